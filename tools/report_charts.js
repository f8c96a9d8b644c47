// Curves: each metric as a chart, the phases of a step, and a card for each run.

// Multiples of 1, 2 or 5 times a power of ten, from below `low` to above `high`.
function ticks(low, high, most, least = 0) {
  const rough = Math.max((high - low) / most, least), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(factor => factor * power >= rough * (1 - 1e-9)) * power;
  const first = Math.floor(low / step + 1e-9), end = Math.ceil(high / step - 1e-9);
  return Array.from({ length: end - first + 1 }, (_, i) => +((first + i) * step).toPrecision(12));
}

// What docs/metrics.md says of a metric.
const meaning = key => (data.meanings.find(([pattern]) => new RegExp(`^${pattern}$`).test(key)) || ['', ''])[1];

// lines: [{name, colour, dash, points: [[step, height, value]], odd: [steps of values that are not finite]}]
function chart(title, lines, marks = [], stacked = false, said = '') {
  const points = lines.flatMap(line => line.points), smooth = stacked ? 0 : +get('smooth');
  const range = values => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  const [left, right] = range([...points.map(p => p[0]), ...marks, ...lines.flatMap(line => line.odd || [])]);
  let [low, high] = range(points.length ? points.map(p => p[1]) : [0]);
  if (stacked || (low > 0 && low < high / 2)) low = 0;
  if (low === high) [low, high] = low ? [Math.min(0, 2 * low), Math.max(0, 2 * low)] : [0, 1];
  if (left > right) return '';  // nothing to draw
  const rows = ticks(low, high, 3), wide = stacked && innerWidth > 700;
  const columns = ticks(left, right, wide ? 12 : 4, 1).filter(step => step >= left && step <= right);
  [low, high] = [rows[0], rows.at(-1)];
  const width = wide ? 1000 : 340, end = width - 12;
  const svg = make('svg', { viewBox: `0 0 ${width} 150` });
  const x = step => 44 + (end - 44) * (step - left) / (right - left || 1);
  const y = v => 132 - 124 * (v - low) / (high - low);
  for (const v of rows)
    svg.append(make('line', { x1: 44, x2: end, y1: y(v), y2: y(v), stroke: 'var(--line)' }),
      make('text', { x: 40, y: y(v) + 3, 'text-anchor': 'end' }, short(v)));
  for (const step of columns)
    svg.append(make('text', { x: x(step), y: 146, 'text-anchor': 'middle' }, short(step)));
  for (const step of marks) svg.append(make('text', { x: x(step), y: 8, class: 'bad' }, '▼'));
  for (const line of lines) {
    const draw = (heights, more) => svg.append(make('path', {
      d: heights.map((v, i) => `${i ? 'L' : 'M'}${x(line.points[i][0])} ${y(v)}h0`).join(''), stroke: line.colour,
      'stroke-width': 1.6, 'stroke-linecap': 'round', fill: stacked ? line.colour : 'none', ...more }));
    const heights = line.points.map(p => p[1]);
    let mean = heights[0];
    if (smooth) draw(heights, { opacity: 0.25 });
    draw(heights.map(v => mean = smooth * mean + (1 - smooth) * v), { 'stroke-dasharray': line.dash || 'none' });
    for (const step of line.odd || []) svg.append(make('text', { x: x(step) - 3, y: 8, class: 'bad' }, '×'));
  }
  const cursor = svg.appendChild(make('line', { y1: 8, y2: 132 })), legend = make('div', { class: 'flow' });
  const say = step => legend.replaceChildren(step === undefined ? 'last' : `step ${step}`, ...lines.map(line => {
    const point = step === undefined ? line.points.at(-1) : line.points.find(p => p[0] === step);
    return make('span', { style: `color: ${line.colour}` }, `${line.name} ${point ? short(point[2]) : ''}`);
  }));
  svg.onpointermove = event => {
    const at = left + (event.offsetX / svg.clientWidth * width - 44) / (end - 44) * (right - left);
    const step = points.reduce((best, p) => Math.abs(p[0] - at) < Math.abs(best - at) ? p[0] : best, left);
    for (const name of ['x1', 'x2']) cursor.setAttribute(name, x(step));
    cursor.setAttribute('stroke', 'var(--faint)');
    say(step);
  };
  say();
  return make('div', { class: stacked ? 'card wide' : 'card' },
    make('b', said ? { title: visible(said) } : {}, visible(title)), legend, svg);
}

// Whether the rewards of a run are 0 or 1, so that accuracy is their mean. prefix: train/ or validation/.../
function isShare(run, prefix) {
  const rewards = run.series[prefix + 'unshaped_reward'] || run.series[prefix + 'reward'];
  const near = (a, b) => a === b || Math.abs(a - b) < 1e-4;
  return !rewards || run.series[prefix + 'accuracy'].every((value, i) => near(value, rewards[i]));
}

// Metrics that count right answers say nothing where rewards are not 0 or 1: they are drawn only if asked for.
function isMisleading(run, key) {
  const [, prefix] = key.match(/^(.*\/)(accuracy\w*|pass_at_\d+|maj_at_\d+)$/) || [];
  return prefix && run.series[prefix + 'accuracy'] && !isShare(run, prefix);
}

// The curves of these metrics in every run: with one run each metric has its colour, with several each run.
function linesOf(keys, label, all = false) {
  const several = data.runs.length > 1;
  return data.runs.flatMap((run, r) => keys.flatMap((key, k) => {
    if (!run.series[key] || (!all && isMisleading(run, key))) return [];
    const points = run.series[key].map((value, i) => [run.steps[i], value, value]).filter(p => p[1] !== null);
    const name = [several && visible(run.name), keys.length > 1 && label(key)].filter(Boolean).join(' ');
    return { name, colour: colour(several ? r : k), dash: several ? ['', '6 3', '2 3', '8 3 2 3'][k % 4] : '',
      points: points.filter(p => isNumber(p[1])), odd: points.filter(p => !isNumber(p[1])).map(p => p[0]) };
  }));
}

const last = key => key.split('/').at(-1);
const keysOf = (runs, start) => [...new Set(runs.flatMap(run => Object.keys(run.series)))]
  .filter(key => key.startsWith(start)).sort();

// charts: [[title, lines, metric]]. Rewards that are accuracies are drawn once; what stays at 0 is folded.
function fill(node, charts, marks, tail = '') {
  const drawn = new Map();
  for (const [title, lines, key] of charts.filter(([, lines]) => lines.length)) {
    const curves = JSON.stringify(lines.map(line => [line.points, line.odd]));
    const id = /(^|\/)(reward|accuracy)$/.test(key) ? curves : key;
    drawn.set(id, drawn.has(id) ? [`${drawn.get(id)[0]} = ${title}`, lines, key] : [title, lines, key]);
  }
  const isFlat = ([, lines]) => lines.every(line => !line.odd.length && line.points.every(point => point[1] === 0));
  const flat = [...drawn.values()].filter(isFlat);
  const draw = ([title, lines, key]) => chart(title, lines, marks, false, meaning(key));
  const folded = make('details', { class: 'card wide' }, make('summary', { class: 'faint' },
    `at 0 all the time: ${flat.map(([title]) => visible(title)).join('; ')}`),
    make('div', { class: 'grid' }, ...flat.map(draw)));
  node.replaceChildren(...[...drawn.values()].filter(each => !isFlat(each)).map(draw), flat.length ? folded : '', tail);
}

function drawCurves() {
  const words = get('metric').toLowerCase().split(' ').filter(Boolean);
  const wanted = keysOf(data.runs, '').filter(key => words.every(word => key.toLowerCase().includes(word)));
  const marks = data.runs.flatMap(run => Object.values(run.held).map(steps => steps[0]));
  const charts = words.length ? wanted.slice(0, 60).map(key => [key]) : data.charts.map(joined => joined.split('+'));
  fill($('charts'), charts.map(keys => [keys.length > 1 ? keys.map(last).join(', ') : keys[0],
    linesOf(keys, last, words.length > 0), keys[0]]), marks,
    words.length ? `${charts.length} of ${wanted.length} metrics that match` : '');
  const keys = keysOf(data.runs, 'validation/').filter(key => !/(accuracy_ci95_\w+|num_problems|pass_at_1)$/.test(key));
  const names = [...new Set(keys.map(key => key.replace(/^validation\/(.*\/)?(greedy|sampled)\//, '')))];
  fill($('validations'), names.map(name => [name, linesOf(keys.filter(key => key.endsWith('/' + name)),
    key => key.slice(11, -name.length - 1)), `validation/sampled/${name}`]), []);
}

function drawPhases() {
  $('phases').replaceChildren(...data.runs.map(run => {
    const total = run.series['timing/train/total_step_time'] || [];
    const rows = run.steps.map((_, i) => i).filter(i => isNumber(total[i])), below = rows.map(() => 0);
    const isPhase = key => new RegExp(`^${data.phase}$`).test(key);
    const named = data.meanings.map(([name]) => name).filter(isPhase);  // a phase has its colour in every report
    const all = [...new Set([...named, ...keysOf(data.runs, 'timing/train/').filter(isPhase)])];
    const lines = all.filter(key => run.series[key]).map(key => {
      const points = rows.map((i, n) => [run.steps[i], below[n] += +run.series[key][i] || 0, run.series[key][i]]);
      const foot = point => point ? [[point[0], 0, point[2]]] : [];
      const outline = [...foot(points[0]), ...points, ...foot(points.at(-1))];
      return { name: key.split('/')[2], colour: colour(all.indexOf(key)), points: outline };
    });
    return chart(run.name, lines.reverse(), [], true);
  }));
}

function median(values) {
  const sorted = values.toSorted((a, b) => a - b), middle = (sorted.length - 1) / 2;
  return (sorted[Math.floor(middle)] + sorted[Math.ceil(middle)]) / 2;
}

// A number of a run's card, under the name of its metric.
const fact = (key, ...parts) => make('div', {},
  make('div', { class: 'faint', title: visible(meaning(key)) }, visible(key)), ...parts);

function drawRuns() {
  $('runs').replaceChildren(...data.runs.map((run, r) => {
    const scores = keysOf([run], 'validation/').filter(key => last(key) === 'accuracy')
      .map(key => isMisleading(run, key) ? key.replace(/accuracy$/, 'reward') : key);
    const keys = [...scores, 'train/reward', 'train/mean_gen_tokens_per_sample'];
    const numbers = key => (run.series[key] || []).filter(isNumber);
    const facts = keys.map(key => [key, numbers(key)]).filter(([, values]) => values.length).map(([key, values]) => {
      const [low, high, count] = ['accuracy_ci95_low', 'accuracy_ci95_high', 'num_problems'].map(
        name => last(key) === 'accuracy' ? numbers(key.replace(/accuracy$/, name)) : []);
      const of = at => [values.at(at), low.length ? ` (${low.at(at).toFixed(3)} to ${high.at(at).toFixed(3)})` : ''];
      const [[first, about], [now, around]] = [of(0), of(-1)];
      return fact(key, make('b', { class: 'fact' }, short(first)), make('span', { class: 'faint' }, about),
        make('b', { class: 'fact' }, ` → ${short(now)}`),
        make('span', { class: 'faint' }, around + (count.length ? `, 95% interval, ${count.at(-1)} problems` : '')));
    });
    const speed = 'performance/tokens_per_sec', speeds = numbers(speed);
    if (speeds.length) facts.push(fact(speed, make('b', { class: 'fact' }, short(median(speeds))),
      make('span', { class: 'faint' }, ' median step')));
    const rules = Object.entries(run.held).map(([key, steps]) =>
      `${last(key)} held at ${steps.length} steps, ${steps[0]} to ${steps.at(-1)} (▼ in curves): see docs/faq.md`);
    const notes = [...rules, ...run.notes].map(note => make('div', { class: 'bad' }, visible(note)));
    const health = Object.keys(run.series).some(key => key.includes('/health/')) && !rules.length;
    const about = Object.entries(run.about).map(([name, text]) => `${name}: ${visible(text)}`).join(' · ');
    return make('div', { class: data.runs.length > 1 ? 'card' : 'card wide' },
      make('b', { style: `color: ${colour(r)}` }, visible(run.name)),
      ` step ${run.steps.at(-1) ?? 0} · ${visible(run.ending)}`, make('div', { class: 'faint' }, about),
      make('div', { class: 'flow facts' }, ...facts),
      health ? make('div', { class: 'faint' }, 'health: nothing wrong seen') : '', ...notes);
  }));
}
