// What the tests of the page measure in the browser.
(() => {
  const numbers = text => text.match(/[\d.]+/g).map(Number);
  const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const opaque = ([r, g, b, a]) => a === undefined || a > .99;
  const background = element => {
    for (; element; element = element.parentElement) {
      const colour = numbers(getComputedStyle(element).backgroundColor);
      if (opaque(colour)) return colour;
    }
    return [255, 255, 255];
  };
  const hasText = element => [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  const contrast = element => {
    const pair = [luminance(numbers(getComputedStyle(element).color)), luminance(background(element))];
    return (Math.max(...pair) + .05) / (Math.min(...pair) + .05);
  };
  return {
    // Texts with a contrast below 4.5; the sticky header is translucent, tinted tokens have grounds of their own.
    pale: [...document.querySelectorAll('body *')]
      .filter(e => e.offsetParent && !e.closest('.tok, .u-wrap, header') && hasText(e) && contrast(e) < 4.5)
      .map(e => `${e.className} ${e.textContent.slice(0, 30)}: ${contrast(e).toFixed(2)}`),
    // Pixels of each canvas that are drawn on.
    ink: [...document.querySelectorAll('canvas')].filter(canvas => canvas.offsetParent).map(canvas => {
      const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      return data.filter((value, i) => i % 4 === 3 && value > 0).length;
    }),
    width: document.documentElement.scrollWidth,
  };
})()
