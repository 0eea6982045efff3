// Draws the page of a run from the JSON in #data. Texts of a run are hostile: they enter the page as textContent only.
'use strict';
const root = document.documentElement, byId = id => document.getElementById(id);
const css = name => getComputedStyle(root).getPropertyValue(name).trim();
const element = (tag, cls, text) => { const made = document.createElement(tag); if (cls) made.className = cls; if (text != null) made.textContent = text; return made; };
const format = v => v == null ? '–' : Math.abs(v) >= 1e5 ? v.toExponential(1) : Math.abs(v) >= 100 ? v.toFixed(0) : Math.abs(v) >= 10 ? v.toFixed(1) : Math.abs(v) >= .1 ? v.toFixed(2) : v === 0 ? '0' : Math.abs(v) < 1e-3 ? v.toExponential(1) : v.toPrecision(2);

root.lang = navigator.language.startsWith('zh') ? 'zh' : 'en';
byId('language').onclick = () => { root.lang = root.lang === 'zh' ? 'en' : 'zh'; };

async function read() {
  const stored = byId('data');
  if (stored.type === 'application/json') return JSON.parse(stored.textContent);
  const packed = atob(stored.textContent), bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'))).text());
}

// A trailing mean does not bend at the end of a curve.
function trend(values) {
  const width = Math.max(1, Math.round(values.length * .1));
  return values.map((value, i) => {
    let sum = 0, count = 0;
    for (let k = Math.max(0, i - width + 1); k <= i; k++) if (values[k] != null) { sum += values[k]; count++; }
    return value == null ? null : sum / count;
  });
}

// Distances of ticks from 10 ** from on: decimal, so that labels with as many digits are exact.
const distances = from => Array.from({length: 18}, (_, p) => [1, 2, 5].map(m => Number(`${m}e${p + from}`))).flat();
const ticks = (u, values, axis, space, distance) => values.map(v => Math.abs(v) >= 1e5 || distance < 1e-3 ? format(v) : v.toFixed(Math.max(0, -Math.floor(Math.log10(distance) + 1e-9))));

const redraws = new Set();  // Functions that draw a part anew, after new values or for another width.

const known = page => [...new Set(page.runs.flatMap(run => Object.keys(run.data)))].sort();

// Metrics of all runs as series of a chart over the steps of any of them.
function lines(page, metrics) {
  const drawn = [];
  if (typeof metrics === 'string') metrics = known(page).filter(name => name.startsWith(metrics)).slice(0, 8);
  page.runs.forEach((run, r) => metrics.forEach((name, m) => { if (run.data[name]) drawn.push({run, r, name, m}); }));
  const steps = [...new Set(drawn.flatMap(d => d.run.step))].sort((a, b) => a - b);
  const at = new Map(steps.map((step, i) => [step, i]));
  const series = [{}], data = [steps], values = [];
  for (const d of drawn) {
    const line = new Array(steps.length).fill(null);
    d.run.step.forEach((step, i) => { line[at.get(step)] = d.run.data[d.name][i]; });
    const known = line.filter(v => v != null), colour = css('--r' + (page.runs.length > 1 ? d.r + 1 : d.m + 1));
    const dash = page.runs.length > 1 && d.m ? [4, 3] : undefined;
    const few = known.length < d.run.step.length / 3 || known.length < 12;
    values.push({name: d.name, shown: page.runs.length === 1 || !d.m, line, colour, few, last: known[known.length - 1]});
    if (few) {
      series.push({stroke: colour, width: 2, dash, spanGaps: true, points: {show: true, size: 6, fill: css('--card'), stroke: colour}});
      data.push(line);
    } else {
      series.push({stroke: colour + '55', width: 1, spanGaps: true, points: {show: false}}, {stroke: colour, width: 2, dash, spanGaps: true, points: {show: false}});
      data.push(line, trend(line));
    }
  }
  return {steps, series, data, values, shape: values.map(v => v.colour + v.few).join()};
}

function chart(parent, page, title, metrics, share) {
  const card = element('div', 'card'), head = element('h3'), label = element('span'), last = element('em'), note = element('p');
  head.append(label, last);
  card.append(head, note);
  parent.append(card);
  let now, plot;
  const show = i => {
    last.replaceChildren();
    if (i != null) last.append(element('small', '', now.steps[i] + ': '));
    now.values.filter(v => v.shown).forEach((v, k) => { const part = element('span', '', (k ? ' · ' : '') + format(i == null ? v.last : v.line[i])); part.style.color = v.colour; last.append(part); });
  };
  const draw = () => {
    if (!card.isConnected) return redraws.delete(draw);
    const before = now;
    now = lines(page, metrics);
    card.hidden = !now.values.length;
    if (card.hidden) return;
    const all = now.values.flatMap(v => v.line).filter(v => v != null), least = Math.min(...all), most = Math.max(...all);
    const constant = all.length > 2 && most - least <= .02 * Math.abs(most);
    label.innerHTML = title + (constant ? `<small> ${page.words.constant}</small>` : '');
    const unit = page.units[now.values[0].name];
    const named = new Map(now.values.map(v => [v.name, v.colour]));
    note.replaceChildren(...[...named].flatMap(([name, colour], k) => {
      const part = element('span', '', name);
      if (named.size > 1 && page.runs.length === 1) part.style.color = colour;
      return k ? [', ', part] : [part];
    }), unit && unit[0] ? ' · ' + unit[0] : '');
    if (unit) note.title = unit[1];
    const width = Math.max(120, card.clientWidth - 24);
    if (plot && before.shape === now.shape) {
      const {min, max} = plot.scales.x, zoomed = min > before.steps[0] || max < before.steps[before.steps.length - 1];
      if (plot.width !== width) plot.setSize({width, height: plot.height});
      plot.setData(now.data, !zoomed);
      if (zoomed) plot.redraw();
      return show(plot.cursor.idx);
    }
    if (plot) plot.destroy();
    const axis = {stroke: css('--dim'), font: '12px Inter, system-ui', ticks: {show: false}};
    plot = new uPlot({
      width, height: 152, legend: {show: false},
      cursor: {sync: {key: 'step'}, y: false, drag: {x: true, y: false}},
      scales: {x: {time: false, range: (u, a, b) => a === b ? [a - .5, b + .5] : [a, b]}, y: {range: share ? () => [0, 1] : (u, a, b) => { const room = (b - a) * .08 || Math.abs(b) * .1 || .1; return [a - room, b + room]; }}},
      axes: [{...axis, grid: {show: false}, size: 24, space: 64, incrs: distances(0)}, {...axis, grid: {stroke: css('--line'), width: 1}, size: 48, space: 24, incrs: distances(-9), values: ticks}],
      series: now.series, hooks: {setCursor: [u => show(u.cursor.idx)]},
    }, now.data, card);
    show(null);
  };
  redraws.add(draw);
  draw();
}

function allMetrics(page) {
  const details = byId('all'), grid = details.querySelector('.grid'), input = byId('filter');
  let timer;
  const draw = () => {
    grid.replaceChildren();
    const found = known(page).filter(name => name.includes(input.value.trim().toLowerCase()));
    found.slice(0, 60).forEach(name => chart(grid, page, element('i', '', name).innerHTML, [name], false));
  };
  details.addEventListener('toggle', () => { if (details.open) draw(); });
  input.addEventListener('input', () => { clearTimeout(timer); timer = setTimeout(draw, 200); });
}

const tints = {
  a: v => v === 0 ? '' : mix(v > 0 ? 'good' : 'bad', 12 + Math.abs(v) * 18),
  lr: v => Math.abs(v) < 5e-4 ? '' : mix(v > 0 ? 'r1' : 'r2', 10 + Math.abs(v) * 120),
  h: v => mix('warn', Math.min(60, v * 24)),
  v: (v, row) => { const kinds = [...new Set(row.v)]; return kinds.length < 2 ? '' : mix('r' + (kinds.indexOf(v) % 8 + 1), 40); },
};
const keys = {a: [-2, -.5, .5, 2], lr: [-.4, -.1, .1, .4], h: [.2, 1, 2], v: []};  // Values of the legend of each tint.
const tinted = (span, tint, value, row) => {
  span.style.background = tints[tint](value, row);
  if (value < 0 && 'a lr'.includes(tint)) span.className = 'down';
};
const mix = (name, percent) => `color-mix(in srgb, var(--${name}) ${Math.min(60, percent).toFixed(0)}%, transparent)`;

function tokens(row, tint) {
  const box = element('span', 'tok');
  row.tok.forEach((text, i) => {
    if (text === '' && i) return;
    const span = element('span', '', text.replace(/\n/g, '↵\n'));
    const value = row[tint][i];
    if (value != null) tinted(span, tint, value, row);
    span.tip = () => [['log p', row.lp[i]], ['p', row.lp[i] == null ? null : Math.exp(row.lp[i])], ['log ratio', row.lr[i]], ['entropy', row.h[i]], ['advantage', row.a[i]], ['version', row.v[i]]]
      .filter(([, v]) => v != null).map(([name, v]) => name + '  ' + (Number.isInteger(v) ? v : v.toPrecision(3))).join('\n');
    box.append(span);
  });
  if (row.cut > 0) box.append(element('small', '', ' +' + row.cut));
  return box;
}

function turns(row) {
  const box = element('div');
  for (const turn of row.turns) {
    const line = element('div', 'turn');
    line.append(element('pre', '', turn.o), element('pre', '', turn.t));
    box.append(line);
  }
  return box;
}

function groups(part, page, step, tint) {
  const box = part.querySelector('.groups'), found = page.samples[part.dataset.run].find(each => each.step === step);
  box.replaceChildren();
  if (!found || !found.groups.length) { const none = element('p', 'empty'); none.innerHTML = page.words.no_text; box.append(none); return; }
  for (const group of found.groups) {
    const made = element('div', 'group'), head = element('div');
    if (group.prompt) head.append(element('span', 'prompt', group.prompt));
    head.append(element('code', '', group.id));
    if (group.truth != null) head.append(element('span', 'dim', '= ' + group.truth));
    const mean = head.appendChild(element('span', 'dim'));
    mean.innerHTML = page.words.mean + ' ' + format(group.mean);
    head.append(element('span', 'share', (100 * group.share).toFixed(1) + ' %'));
    made.append(head);
    for (const row of group.rows) {
      const mean = row.a.length && row.a[0] != null ? row.a.reduce((a, b) => a + b, 0) / row.a.length : null;
      const line = element('div', 'resp'), value = element('span', mean > 0 ? 'pos' : mean < 0 ? 'neg' : '', mean == null ? '' : (mean > 0 ? '+' : '') + mean.toFixed(2));
      const said = element('div');
      said.append(row.turns.length ? turns(row) : tokens(row, tint));
      if (row.of) said.append(element('div', 'of', row.of));
      line.append(element('span', 'n', row.n + ' ×'), element('span', '', format(row.score)), value, said);
      made.append(line);
    }
    if (group.left > 0) made.append(left(page, group.left));
    box.append(made);
  }
  if (found.left > 0) box.append(left(page, found.left));
}

const left = (page, count) => { const made = element('div', 'left'); made.innerHTML = `+${count} ${page.words.not_shown}`; return made; };

function samples(page) {
  document.querySelectorAll('#samples .of-run').forEach(part => {
    part.append(element('div', 'groups'));
    const chosen = {tint: 'a'};
    const mark = () => {
      const newest = part.querySelector('[data-step]');
      if (newest && chosen.step == null) { chosen.step = Number(newest.dataset.step); draw(); }
      part.querySelectorAll('[data-step]').forEach(button => button.setAttribute('aria-pressed', Number(button.dataset.step) === chosen.step));
      part.querySelectorAll('[data-tint]').forEach(button => button.setAttribute('aria-pressed', button.dataset.tint === chosen.tint));
      part.querySelectorAll('.key').forEach(box => {
        box.innerHTML = page.words['key_' + chosen.tint];
        for (const value of keys[chosen.tint]) tinted(box.appendChild(element('span', '', format(value))), chosen.tint, value);
      });
      part.querySelectorAll('select').forEach(list => { list.value = chosen.step; if (list.selectedIndex < 0) list.selectedIndex = 0; });
    };
    const draw = async () => {
      const {step} = chosen;
      if (page.load) await page.load(step);
      if (step === chosen.step) groups(part, page, step, chosen.tint);
    };
    const choose = ({step = chosen.step, tint = chosen.tint}) => { Object.assign(chosen, {step: Number(step), tint}); mark(); draw(); };
    part.addEventListener('click', event => { const button = event.target.closest('.tools button'); if (button) choose(button.dataset); });
    part.addEventListener('change', event => choose({step: event.target.value}));
    redraws.add(mark);
    mark();
  });
}

function chips() {
  const buttons = [...document.querySelectorAll('.chip')];
  buttons.forEach(button => button.onclick = () => {
    buttons.forEach(each => each.setAttribute('aria-pressed', each === button));
    document.querySelectorAll('.of-run').forEach(part => { part.hidden = part.dataset.run !== button.dataset.run; });
    dispatchEvent(new Event('resize'));
  });
}

function tips() {
  const tip = document.body.appendChild(element('div'));
  tip.id = 'tip';
  document.addEventListener('mousemove', event => {
    const text = event.target.tip ? event.target.tip() : event.target.dataset && event.target.dataset.tip;
    tip.style.display = text ? 'block' : 'none';
    if (!text) return;
    tip.textContent = text;
    tip.style.left = Math.min(innerWidth - 184, event.clientX + 12) + 'px';
    tip.style.top = Math.min(innerHeight - 96, event.clientY + 16) + 'px';
  });
}

const colours = {wait_prev_gen: 'wait', old_log_probs: 'log_probs', values: 'log_probs', train_critic: 'train', weight_update: 'update', checkpoint_wait: 'checkpoint', reward: 'r7', env: 'r6'};
const fill = what => `var(--${colours[what] || (css('--' + what) ? what : 'other')})`;
const shape = (parent, tag, values, tip) => {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(values)) made.setAttribute(name, value);
  if (tip) made.dataset.tip = tip;
  return parent.appendChild(made);
};

function lanes(page) {
  document.querySelectorAll('.lanes').forEach(box => {
    const number = box.closest('.of-run').dataset.run, range = box.querySelector('input'), widths = [...box.querySelectorAll('[data-width]')];
    const state = {first: null, width: 5};  // null: the newest steps
    const draw = () => {
      const found = page.lanes[number];
      box.hidden = !found.lanes;
      box.previousElementSibling.hidden = !box.hidden;
      if (box.hidden) return;
      const steps = found.steps, count = state.width || Math.max(1, steps.length), most = Math.max(0, steps.length - count);
      const first = Math.min(state.first ?? most, most), until = Math.min(steps.length, first + count) - 1;
      Object.assign(range, {max: most, value: first});
      widths.forEach(button => button.setAttribute('aria-pressed', Number(button.dataset.width) === state.width));
      const from = first ? steps[first - 1][1] : 0, to = steps.length ? steps[until][1] : found.lanes.reduce((a, lane) => lane.spans.reduce((b, s) => Math.max(b, s[1] + s[2]), a), 0);
      const drawn = box.querySelector('.drawn'), wide = Math.max(280, drawn.clientWidth), left = 72, scale = (wide - left - 8) / Math.max(1, to - from);
      const x = ms => left + (Math.max(from, Math.min(to, ms)) - from) * scale, foot = 24 * found.lanes.length;
      drawn.replaceChildren();
      if (most) strip(drawn, steps, first, until, left, wide - 8, at => { state.first = Math.max(0, Math.min(most, at - Math.floor(count / 2))); draw(); });
      const svg = shape(drawn, 'svg', {width: wide, height: foot + 24, viewBox: `0 0 ${wide} ${foot + 24}`, role: 'img'});
      steps.slice(first, until + 1).forEach(([step, end], i, all) => {
        const start = i ? all[i - 1][1] : from;
        shape(svg, 'line', {x1: x(end), x2: x(end), y1: 0, y2: foot, class: 'rule'});
        if (x(end) - x(start) > 28) shape(svg, 'text', {x: (x(start) + x(end)) / 2, y: foot + 16, 'text-anchor': 'middle'}).textContent = step;
      });
      found.lanes.forEach((lane, row) => {
        shape(svg, 'text', {x: 0, y: 24 * row + 16}).textContent = lane.who;
        for (const [kind, start, length, step] of lane.spans) {
          if (start + length < from || start > to) continue;
          shape(svg, 'rect', {x: x(start), y: 24 * row + 4, width: Math.max(1, x(start + length) - x(start)), height: 16, rx: 2, style: 'fill:' + fill(found.what[kind])}, `${found.what[kind]}  ${(length / 1000).toPrecision(3)} s\nstep ${step}`);
        }
      });
      for (const [at, text] of found.marks) if (at >= from && at <= to) shape(svg, 'rect', {x: x(at), y: 0, width: 3, height: foot, class: 'mark'}, text);
      const items = found.what.map(what => { const item = element('li'), dot = element('i'); dot.style.background = fill(what); item.append(dot, element('span', '', what)); return item; });
      box.querySelector('.legend').replaceChildren(...items);
    };
    widths.forEach(button => button.onclick = () => { state.width = Number(button.dataset.width); draw(); });
    range.oninput = () => { state.first = range.value === range.max ? null : Number(range.value); draw(); };
    box.querySelector('.save').onclick = () => save(page.lanes[number]);
    redraws.add(draw);
    draw();
  });
}

// Seconds of all steps, with the steps from `first` to `until` marked; `choose` gets the one that is pressed.
function strip(parent, steps, first, until, left, right, choose) {
  const svg = shape(parent, 'svg', {width: right + 8, height: 40, viewBox: `0 0 ${right + 8} 40`, class: 'strip'}), each = (right - left) / steps.length;
  const seconds = steps.map(([, end], i) => end - (i ? steps[i - 1][1] : 0)), highest = Math.max(1, ...seconds);
  let line = `M${left},28`;
  seconds.forEach((value, i) => line += `V${(28 - 24 * value / highest).toFixed(1)}H${(left + (i + 1) * each).toFixed(1)}`);
  shape(svg, 'path', {d: line + 'V28Z'});
  shape(svg, 'rect', {x: left + first * each, y: 1, width: Math.max(4, (until + 1 - first) * each), height: 30, rx: 4});
  svg.onpointerdown = svg.onpointermove = event => {
    if (event.buttons & 1) choose(Math.floor((event.clientX - svg.getBoundingClientRect().x - left) / each));
  };
}

// The same spans as trace events, which ui.perfetto.dev opens.
function save(found) {
  const events = found.lanes.flatMap((lane, tid) => [{ph: 'M', name: 'thread_name', pid: 1, tid, args: {name: lane.who}}, ...lane.spans.map(([kind, start, length, step]) => ({ph: 'X', name: found.what[kind], pid: 1, tid, ts: 1000 * start, dur: 1000 * length, args: {step}}))]);
  const link = element('a');
  link.href = URL.createObjectURL(new Blob([JSON.stringify({traceEvents: events})], {type: 'application/json'}));
  link.download = 'trace.json';
  link.click();
}

function histograms(page) {
  document.querySelectorAll('[data-hist]').forEach(grid => {
    const draw = () => {
      grid.replaceChildren();
      for (const each of page.histograms[grid.closest('.of-run').dataset.run]) if (each.section === grid.dataset.hist) {
        const card = element('div', 'card'), head = element('h3');
        head.innerHTML = each.title;
        card.append(head);
        grid.append(card);
        (each.bars ? bars : columns)(card, each);
      }
    };
    draw();
    redraws.add(draw);
  });
}

function columns(card, {x, y, v}) {
  const wide = Math.max(240, card.clientWidth - 24), left = 56, high = 14, dx = (wide - left) / x.length;
  const svg = shape(card, 'svg', {width: wide, height: high * y.length + 24, role: 'img'});
  y.forEach((name, row) => { shape(svg, 'text', {x: left - 6, y: high * (y.length - row) - 3, 'text-anchor': 'end'}).textContent = name; });
  v.forEach((shares, column) => shares.forEach((share, row) => {
    if (share) shape(svg, 'rect', {x: left + dx * column, y: high * (y.length - 1 - row), width: Math.max(1, dx - (dx > 4)), height: high - 1, style: `fill:var(--r1);opacity:${(.15 + .85 * share).toFixed(2)}`}, `step ${x[column]}: ${y[row]}\n${(100 * share).toFixed(1)} %`);
  }));
  [0, x.length - 1].forEach(column => shape(svg, 'text', {x: column ? wide : left, y: high * y.length + 16, 'text-anchor': column ? 'end' : 'start'}).textContent = x[column]);
}

function bars(card, {bars}) {
  const wide = Math.max(240, card.clientWidth - 24), left = 72, high = 18, values = bars.map(bar => bar[1]), least = Math.min(0, ...values), most = Math.max(0, ...values), x = v => left + (wide - left - 56) * (v - least) / ((most - least) || 1);
  const svg = shape(card, 'svg', {width: wide, height: high * bars.length + 8, role: 'img'});
  bars.forEach(([name, score, count], row) => {
    shape(svg, 'text', {x: left - 6, y: high * row + 13, 'text-anchor': 'end'}).textContent = name;
    shape(svg, 'rect', {x: Math.min(x(0), x(score)), y: high * row + 3, width: Math.max(1, Math.abs(x(score) - x(0))), height: 12, style: 'fill:var(--r1)'}, `${name}: ${format(score)}\n${count} samples`);
    shape(svg, 'text', {x: Math.max(x(0), x(score)) + 6, y: high * row + 13}).textContent = format(score);
  });
}

read().then(page => {
  if (page.live) live(page);
  for (const c of page.charts) chart(document.querySelector(`[data-charts=${c.section}]`), page, c.title, c.metrics, c.share);
  allMetrics(page);
  lanes(page);
  histograms(page);
  samples(page);
  chips();
  tips();
  const below = () => { root.style.scrollPaddingTop = document.querySelector('header').offsetHeight + 8 + 'px'; };  // where a link goes
  redraws.add(below), below();
  let timer;
  addEventListener('resize', () => { clearTimeout(timer); timer = setTimeout(() => redraws.forEach(draw => draw()), 100); });
  root.dataset.ready = 'true';
});
