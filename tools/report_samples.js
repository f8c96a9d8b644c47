// Samples: filters, the list, and the reader, which shows one reply, its group side by side, or an agent's messages.

let samples;
const CHOICES = ['run', 'kind', 'env_name'];
const PAGE_SIZE = 50;
const OUTCOME_COLOURS = { ok: 'var(--c2)', wrong: 'var(--c5)', parse_fail: 'var(--c1)', timeout: 'var(--c3)' };
const outcomeColour = outcome => OUTCOME_COLOURS[outcome] || 'var(--faint)';

function prepareSamples() {
  samples = data.runs.flatMap((run, r) => run.samples.map(s => {
    const texts = [s.prompt, s.reply, s.expected, ...s.tree.map(node => node.text)];
    s.tokens.sharedAdvantage = s.advantage;
    for (const node of s.tree) node.tokens.sharedAdvantage = node.call?.advantage;
    const gaps = tokensIn(s).flatMap(tokens => tokens.gap || []).filter(isNumber);
    return {
      ...s,
      run: run.name,
      outcome: s.outcome || 'unknown',
      key: [r, s.step, s.line].join(':'),
      group: [r, s.step, s.kind, s.env_name, s.row_id].join(':'),
      searched: texts.join('\n').toLowerCase(),
      gap: gaps.reduce((sum, gap) => sum + Math.abs(gap), 0) / gaps.length,
    };
  }));
  const mixed = mixedGroups(samples);
  for (const sample of samples) sample.mixed = mixed.has(sample.group);
}

// The groups whose rewards differ.
function mixedGroups(some) {
  const rewards = new Map(), mixed = new Set();
  for (const { group, reward } of some) {
    if (!isNumber(reward)) continue;
    if (!rewards.has(group)) rewards.set(group, reward);
    if (reward !== rewards.get(group)) mixed.add(group);
  }
  return mixed;
}

// ----------------------------------------------------------------------------------------------------------- filters

const words = () => get('words').toLowerCase();

function isInside(sample, name) {
  const low = get(name + '_min'), high = get(name + '_max');
  if (!low && !high) return true;
  return isNumber(sample[name]) && (!low || sample[name] >= +low) && (!high || sample[name] <= +high);
}

const matchesOthers = sample => CHOICES.every(name => !get(name) || sample[name] === get(name))
  && isInside(sample, 'step') && isInside(sample, 'reward') && sample.searched.includes(words());

// The highest first of what was chosen, and the newest first of equals. At the start, groups whose rewards differ.
function inOrder(some) {
  const name = get('sort') || 'mixed', sign = name === 'oldest' ? 1 : -1;
  const value = sample => +sample[name] || 0;  // of true 1
  return some.sort((a, b) => value(b) - value(a) || sign * (a.step - b.step));
}

// The outcomes among the samples that match the other filters, with their numbers; a second press takes one back.
function drawOutcomes(some) {
  const counts = new Map();
  for (const sample of some) counts.set(sample.outcome, (counts.get(sample.outcome) || 0) + 1);
  if (get('outcome') && !counts.has(get('outcome'))) counts.set(get('outcome'), 0);
  const choose = outcome => {
    set('outcome', outcome === get('outcome') ? '' : outcome);
    drawSamples();
    [...$('outcomes').children].find(button => button.value === outcome)?.focus();
  };
  const all = makeButton(`every outcome ${some.length}`, () => choose(get('outcome')),
    { class: 'chip', 'aria-pressed': !get('outcome') });
  const buttons = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 12).map(([outcome, count]) =>
    makeButton(`${visible(outcome)} ${count}`, () => choose(outcome),
      { class: 'chip', value: outcome, 'aria-pressed': outcome === get('outcome'), style: dotStyle(outcome) }));
  $('outcomes').replaceChildren(all, ...buttons);
}

const dotStyle = outcome => `--dot: ${outcomeColour(outcome)}`;

// -------------------------------------------------------------------------------------------------------------- list

let shown = [];  // the samples that match, in the order of the list

function drawSamples() {
  const others = samples.filter(matchesOthers);
  drawOutcomes(others);
  shown = inOrder(others.filter(sample => !get('outcome') || sample.outcome === get('outcome')));
  const count = +get('count') || PAGE_SIZE;
  $('matching').textContent = `${shown.length} of ${samples.length} samples`;
  $('list').replaceChildren(...shown.slice(0, count).map(item));
  $('more').hidden = shown.length <= count;
  drawReader();
}

function item(sample) {
  const facts = [data.runs.length > 1 && visible(sample.run), `step ${sample.step}`,
    !sample.kind.startsWith('train') && visible(sample.kind), `reward ${short(sample.reward)}`,
    isNumber(sample.advantage) && `advantage ${signed(sample.advantage)}`, sample.tree.length > 0 && 'agent'];
  const button = makeButton('', () => open(sample), { class: 'item', 'data-key': sample.key });
  if (sample.key === get('open')) button.setAttribute('aria-current', 'true');
  button.append(
    make('div', { class: 'faint one-line' }, badge(sample.outcome), facts.filter(Boolean).join(' · ')),
    make('div', { class: 'one-line text' }, make('span', { class: 'faint' }, line(ending(firstAsked(sample))), ' → '),
      line(excerpt(lastReply(sample).text))));
  return button;
}

// The last words of a prompt, without the markup of a chat that follows them.
function ending(prompt) {
  const text = prompt.replace(/(<\|[^<>]*\|>|<\w+>|assistant|model|\s)+$/, '');
  return text.length > 16 ? `…${text.slice(-15)}` : text;
}

// The part of a reply that has the words of the search, or else its start.
function excerpt(text) {
  const place = words() ? text.toLowerCase().indexOf(words()) : -1;
  if (place < 16) return text.slice(0, 160);
  return `… ${text.slice(place - 8, place + 150)}`;
}

const badge = outcome => make('span', { class: 'badge', style: dotStyle(outcome) }, visible(outcome));

function open(sample, focus = true) {
  set('open', sample && sample.key);
  for (const button of $('list').children) {
    if (sample && button.dataset.key === sample.key) button.setAttribute('aria-current', 'true');
    else button.removeAttribute('aria-current');
  }
  drawReader();
  if (sample && focus) $('reader').focus({ preventScroll: true });
}

// The sample so many places further in the list.
function openNeighbour(way) {
  const place = shown.findIndex(sample => sample.key === get('open'));
  const next = shown[Math.max(0, place + way)];
  if (!next) return;
  if (shown.indexOf(next) >= (+get('count') || PAGE_SIZE)) showMore();
  open(next, false);
}

// Scrolls the list alone, and only if it must.
function showInList(item) {
  const list = $('list'), top = item.offsetTop - list.scrollTop;
  if (top < 0 || top + item.offsetHeight > list.clientHeight) list.scrollTop = item.offsetTop - list.clientHeight / 3;
}

function showMore() {
  set('count', (+get('count') || PAGE_SIZE) + PAGE_SIZE);
  drawSamples();
}

// ------------------------------------------------------------------------------------------------------------ reader

function drawReader() {
  const sample = samples.find(s => s.key === get('open'));
  const reader = $('reader');
  reader.hidden = !sample;
  document.body.classList.toggle('reading', !!sample);
  if (!sample) {
    markWords([$('list')]);
    return;
  }
  const current = $('list').querySelector('[aria-current]');
  if (current) showInList(current);
  const group = samples.filter(s => s.group === sample.group).sort((a, b) => a.index - b.index);
  const views = viewsOf(sample, group);
  const view = views.find(({ name }) => name === get('view')) || views[0];
  const colours = coloursOf((view.name === 'group' ? group : [sample]).flatMap(tokensIn));
  const colour = chosenColour(colours);
  reader.replaceChildren(readerBar(views, view), heading(sample), colourBar(colours, colour, sample),
    ...view.draw(sample, group, colour));
  if (colours.length) reader.append(make('div', { id: 'numbers', class: 'faint', role: 'status' },
    'Point at a token, touch it, or walk with ← and →, to read its numbers.'));
  markWords([$('list'), reader]);
}

// What can be shown of a sample; the first is shown unless another was chosen.
function viewsOf(sample, group) {
  const views = [{ name: 'reply', title: 'Reply', draw: drawReply }];
  if (sample.tree.length) views.unshift({ name: 'messages', title: 'Messages', draw: drawMessages });
  if (group.length > 1) views.push({ name: 'group', title: `Group of ${group.length}`, draw: drawGroup });
  return views;
}

function chosenColour(colours) {
  if (get('colour') === 'none') return '';
  return colours.includes(get('colour')) ? get('colour') : colours[0] || '';
}

function readerBar(views, view) {
  return make('div', { class: 'bar reader-bar' },
    makeButton('‹', () => openNeighbour(-1), { 'aria-label': 'previous sample', title: 'previous (k)' }),
    makeButton('›', () => openNeighbour(1), { 'aria-label': 'next sample', title: 'next (j)' }),
    views.length > 1 ? choice('view', views.map(({ name, title }) => [name, title]), view.name) : '',
    makeButton('×', () => open(null), { class: 'close', 'aria-label': 'close', title: 'close (Esc)' }));
}

function colourBar(colours, colour, sample) {
  if (!colours.length) {
    const isTraining = sample.kind.startsWith('train');
    return make('p', { class: 'faint' }, isTraining ? 'The first samples of a step have tokens, but not this one.'
      : 'Samples of a validation have no tokens.');
  }
  const options = [['none', 'plain'], ...colours.map(name => [name, name])];
  return make('div', { class: 'bar' }, choice('colour', options, colour || 'none', 'colour tokens by '),
    colour ? legend(colour) : '');
}

// Buttons of which one is pressed: the value of a name in the state.
function choice(name, options, chosen, label = '') {
  const buttons = options.map(([value, text]) => makeButton(text, () => {
    set(name, value);
    drawReader();
    $('reader').querySelector(`[name=${name}][value=${value}]`).focus();
  }, { name, value, 'aria-pressed': value === chosen }));
  return make('div', { class: 'choice', role: 'group', 'aria-label': label || name },
    label ? make('span', { class: 'faint' }, label) : '', ...buttons);
}

function heading(sample) {
  const facts = [['reward', short(sample.reward)],
    sample.unshaped_reward !== '' && sample.unshaped_reward !== sample.reward
      && ['before shaping', short(sample.unshaped_reward)],
    sample.rewards && ['of', visible(sample.rewards)],
    sample.advantage !== '' && ['advantage', signed(sample.advantage)],
    sample.expected !== '' && ['expected', short(sample.expected)],
    sample.num_gen_tokens !== '' && ['sampled tokens', short(sample.num_gen_tokens)],
    sample.finish_reason && ['ended by', visible(sample.finish_reason)],
    sample.weight_version !== '' && ['weights of step', short(sample.weight_version)],
    ['row', `${visible(sample.row_id)}, sample ${visible(sample.index)}`],
    sample.message && ['message', visible(sample.message)]].filter(Boolean);
  const where = [data.runs.length > 1 && sample.run, `step ${sample.step}`, sample.kind, sample.env_name];
  return make('div', { class: 'heading' },
    make('h3', {}, badge(sample.outcome), visible(where.filter(Boolean).join(' · '))),
    make('dl', {}, ...facts.map(([name, text]) => make('div', {}, make('dt', {}, name), make('dd', {}, text)))));
}

const titled = (title, ...children) => make('section', { class: 'part' }, make('h4', {}, title), ...children);
const promptPart = text => titled('Prompt', make('pre', { class: 'prompt', tabindex: 0 }, visible(text)));

function drawReply(sample, group, colour) {
  return [promptPart(sample.prompt), titled('Reply', tokenText(sample.reply, sample.tokens, colour))];
}

// A group's samples side by side, under their prompt.
function drawGroup(sample, group, colour) {
  const counts = new Map();
  for (const each of group) counts.set(each.outcome, (counts.get(each.outcome) || 0) + 1);
  const outcomes = [...counts].map(([outcome, count]) => `${count} ${visible(outcome)}`);
  const rewards = group.map(each => each.reward).filter(isNumber);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const most = Math.max(...group.map(each => Math.abs(each.advantage) || 0)) || 1;
  const columns = group.map(each => {
    const head = makeButton('', () => openAlone(each), { class: 'column-head' });
    head.append(badge(each.outcome), make('span', {}, `reward ${short(each.reward)}`),
      make('span', { class: 'faint' }, `#${each.index}`), bar(each.advantage, most));
    const { text, tokens } = lastReply(each);
    return make('div', { class: each === sample ? 'column open' : 'column' }, head,
      each.tree.length ? smallTree(each.tree, () => openAlone(each)) : '', tokenText(text, tokens, colour));
  });
  return [promptPart(firstAsked(sample)), titled('Samples of this prompt',
    make('p', { class: 'faint' }, `mean reward ${short(mean)} · ${outcomes.join(', ')}`),
    make('div', { class: 'columns' }, ...columns))];
}

// The prompt; of an agent's rollout, whose sequences have prompts of their own, the messages before the first reply.
function firstAsked({ tree, prompt }) {
  const first = tree.findIndex(node => node.call);
  if (first < 0) return prompt;
  return tree.slice(0, first).map(node => `${node.role}: ${node.text}`).join('\n');
}

function openAlone(sample) {
  set('view', '');
  open(sample);
}

// The reply; of an agent's rollout the one that was asked last.
function lastReply(sample) {
  const replies = sample.tree.filter(node => node.call).sort((a, b) => a.call.number - b.call.number);
  return replies.at(-1) || { text: sample.reply, tokens: sample.tokens };
}

// An advantage as a bar from the middle to the right (above 0) or to the left.
function bar(value, most) {
  if (!isNumber(value)) return '';
  const share = Math.abs(value) / most * 50;
  const place = value < 0 ? 'right: 50%' : 'left: 50%';
  const colour = value < 0 ? '--below' : '--above';
  return make('span', { class: 'signed-bar' }, make('span', {}, signed(value)), make('span', { class: 'track' },
    make('span', { style: `${place}; width: ${share}%; background: var(${colour})` })));
}

// --------------------------------------------------------------------------------------------- an agent's messages

// The messages of a rollout: what follows one another in one column, and each branch in a frame of its own.
function drawMessages(sample, group, colour) {
  const { roots, children } = branchesOf(sample.tree);
  const thread = (first, depth) => {
    const parts = [];
    for (let i = first; ; i = children[i][0]) {
      parts.push(message(sample.tree[i], i, colour));
      if (children[i].length > 1) parts.push(...branches(children[i], depth + 1));
      if (children[i].length !== 1) return parts;
    }
  };
  const branches = (firsts, depth) => firsts.map((first, n) => {
    const what = depth ? `branch ${n + 1} of ${firsts.length}` : `conversation ${n + 1} of ${firsts.length}`;
    return make('details', { class: 'branch', open: '' }, make('summary', { class: 'faint' }, what),
      ...thread(first, depth));
  });
  const parts = roots.length === 1 ? thread(roots[0], 0) : branches(roots, 0);
  const about = 'Discs: replies of the policy, numbered as they were asked, in the colour of their advantage.';
  return [titled('Calls', make('p', { class: 'faint' }, about), smallTree(sample.tree, goTo)),
    titled('Messages', ...parts)];
}

// Places of the messages that begin a conversation, and of those that follow each message.
function branchesOf(tree) {
  const roots = [], children = tree.map(() => []);
  tree.forEach((node, i) => (node.parent < 0 ? roots : children[node.parent]).push(i));
  return { roots, children };
}

function goTo(i) {
  const goal = $(`message-${i}`);
  for (let box = goal.closest('details'); box; box = box.parentElement.closest('details')) box.open = true;
  goal.scrollIntoView({ block: 'center' });
  goal.focus({ preventScroll: true });
}

function message(node, i, colour) {
  const { call } = node;
  const facts = call && [`call ${call.number}`, `${call.num_tokens} tokens`, call.is_trained ? '' : 'not trained',
    `reward ${short(call.reward)}`, `advantage ${signed(call.advantage)}`].filter(Boolean).join(' · ');
  const role = ['system', 'user', 'assistant', 'tool'].includes(node.role) ? node.role : 'other';
  return make('div', { class: `message ${call ? 'policy' : role}`, id: `message-${i}`, tabindex: -1 },
    make('div', { class: 'faint' }, make('b', {}, call ? 'policy' : visible(node.role)), ' ', visible(facts || '')),
    tokenText(node.text, node.tokens, colour));
}

// The tree, drawn small from left to right: a disc for each reply of the policy, with its advantage's colour, a ring
// for any other message. pick: what a press on one does.
function smallTree(tree, pick) {
  const { roots, children } = branchesOf(tree);
  const rows = tree.map(() => 0), columns = tree.map(() => 0), leaves = tree.map(() => 0);
  for (let i = tree.length - 1; i >= 0; i--) {  // a message stands behind the one before it
    leaves[i] ||= 1;
    if (tree[i].parent >= 0) leaves[tree[i].parent] += leaves[i];
  }
  let numRows = 0;
  for (const root of roots) {
    rows[root] = numRows;
    numRows += leaves[root];
  }
  tree.forEach((node, i) => {
    let row = rows[i];
    for (const child of children[i]) {
      rows[child] = row;
      columns[child] = columns[i] + 1;
      row += leaves[child];
    }
  });
  const numColumns = columns.reduce((most, column) => Math.max(most, column + 1), 0);
  const width = numColumns * 34, height = numRows * 26 + 6;
  const x = i => columns[i] * 34 + 16, y = i => rows[i] * 26 + 16;
  const svg = make('svg', { viewBox: `0 0 ${width} ${height}`, width, height, class: 'map', role: 'group',
    'aria-label': 'the calls as a tree' });
  tree.forEach(({ parent }, i) => {
    if (parent < 0) return;
    const middle = (x(parent) + x(i)) / 2;
    const curve = `M${x(parent)} ${y(parent)}C${middle} ${y(parent)} ${middle} ${y(i)} ${x(i)} ${y(i)}`;
    svg.append(make('path', { d: curve }));
  });
  tree.forEach((node, i) => {
    const { call } = node;
    const who = call ? `call ${call.number}, advantage ${signed(call.advantage)}` : node.role;
    const name = `${who}: ${node.text.slice(0, 60)}`;
    const disc = make('circle', { cx: x(i), cy: y(i), r: call ? 9 : 5, class: call ? 'call' : 'said' });
    if (call?.advantage > 0) disc.style.fill = 'var(--above)';
    if (call?.advantage < 0) disc.style.fill = 'var(--below)';
    const go = make('g', { tabindex: 0, role: 'button', 'aria-label': line(name) }, make('title', {}, line(name)), disc,
      ...(call ? [make('text', { x: x(i), y: y(i) + 3.5, 'text-anchor': 'middle' }, visible(call.number))] : []));
    go.onclick = () => pick(i);
    go.onkeydown = event => {
      if (event.key !== 'Enter' && event.key !== ' ') return;
      event.preventDefault();
      go.onclick();
    };
    svg.append(go);
  });
  return make('div', { class: 'map-box' }, svg);
}

// ------------------------------------------------------------------------------------------------ words of the search

// Marks them where they stand in a text as it is; words that cross the border of two tokens stay without a mark.
function markWords(boxes) {
  if (!window.Highlight) return;
  CSS.highlights.delete('words');
  const wanted = words();
  if (!wanted) return;
  const ranges = [];
  for (const box of boxes) {
    const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const text = walker.currentNode.data.toLowerCase();
      if (text.length !== walker.currentNode.length) continue;  // a letter became two: places differ
      for (let at = text.indexOf(wanted); at >= 0 && ranges.length < 2000; at = text.indexOf(wanted, at + 1)) {
        const range = new Range();
        range.setStart(walker.currentNode, at);
        range.setEnd(walker.currentNode, at + wanted.length);
        ranges.push(range);
      }
    }
  }
  CSS.highlights.set('words', new Highlight(...ranges));
}
