// Keeps the page that `roll watch` serves up to date; the page of `roll report` is without this script.
'use strict';

function live(page) {
  const run = page.runs[0], at = page.live, shown = {};
  const line = element('div', 'bar live'), says = element('span'), when = element('span', 'dim');
  says.setAttribute('role', 'status');
  line.append(says, when);
  document.querySelector('nav').before(line);

  const say = state => {
    if (line.dataset.state === state) return;
    line.dataset.state = state;
    says.innerHTML = at.words[state];
    if (state !== 'live_replaced') return;
    const button = says.appendChild(element('button'));
    button.innerHTML = at.words.live_reload;
    button.onclick = () => location.reload();
  };
  const get = async path => {
    const answer = await fetch(path, {cache: 'no-store'});
    if (!answer.ok) throw new Error(answer.statusText);
    return answer.json();
  };
  page.load = async step => {
    if (page.samples[0].some(each => each.step === step)) return;
    try { page.samples[0].push(await get('samples/' + step)); } catch { say('live_lost'); }
  };

  // Adds the values of later steps, in place of those that the run took back.
  const extend = (steps, data, since) => {
    const kept = run.step.filter(step => step <= since).length, gap = count => new Array(count).fill(null);
    for (const name of new Set([...Object.keys(run.data), ...Object.keys(data)])) {
      run.data[name] = [...(run.data[name] || gap(run.step.length)).slice(0, kept), ...(data[name] || gap(steps.length))];
    }
    run.step = [...run.step.slice(0, kept), ...steps];
  };
  // Steps without a button that have samples too.
  const offer = (box, steps) => {
    const others = steps.filter(step => !box.querySelector(`[data-step="${step}"]`));
    if (!others.length) return;
    const list = box.querySelector('.tools span').appendChild(element('select'));
    list.setAttribute('aria-label', 'step');
    list.append(new Option('…', ''), ...others.reverse().map(step => new Option(step)));
    list.options[0].disabled = true;
  };
  // The server made this HTML as it made that of the page, with every text of the run escaped.
  const replace = (name, html, steps) => {
    const box = document.querySelector(`[data-part=${name}]`), focus = box.contains(document.activeElement) ? document.activeElement.dataset : {};
    if (shown[name] === html) return;
    shown[name] = box.innerHTML = html;
    if (name === 'samples') offer(box, steps);
    const again = focus.step ? `[data-step="${focus.step}"]` : focus.tint ? `[data-tint="${focus.tint}"]` : null;
    if (again) box.querySelector(again)?.focus();
  };
  const apply = ({rewinds, since, series, version, parts, kept, lanes, histograms}) => {
    if (rewinds !== at.rewinds) page.samples[0] = [];
    if (rewinds !== at.rewinds || series.step.length) extend(series.step, series.data, since);
    else if (!parts) return;
    for (const [name, html] of Object.entries(parts || {})) replace(name, html, kept);
    if (lanes) Object.assign(page, {lanes: [lanes], histograms: [histograms]});
    Object.assign(at, {rewinds, version: version ?? at.version});
    redraws.forEach(draw => draw());
    when.textContent = new Date().toLocaleTimeString();
  };
  const poll = async () => {
    let news = {state: 'live_lost'};
    try { news = await get(`changes/${at.number}/${at.rewinds}/${run.step.at(-1) ?? -1}/${at.version}`); } catch {}
    if (news.state === 'live_replaced' && !at.number) return location.reload();
    say(news.state);
    if (news.series) apply(news);
    setTimeout(poll, 1000);
  };
  poll();
}
