// Tokens in colour: what can be shown of each, the scale of its colours, the legend, the numbers of one token.

// Of each colour: what it is, and the value of a token. A token that was not sampled, or is not trained, has none.
// signed: two colours, which meet at 0; else one colour, from 0 on.
const COLOURS = {
  advantage: {
    signed: true,
    about: 'blue: the step pushes the token\u2019s probability up; orange: down',
    of: (tokens, i) => tokens.advantage ? tokens.advantage[i] : tokens.sharedAdvantage,
    has: () => true,
  },
  surprise: {
    about: '\u2212log p of the sampler: how unlikely the token was when it was drawn',
    of: (tokens, i) => -tokens.sampler[i],
    has: () => true,
  },
  entropy: {
    about: 'of the policy before the token was drawn, in nats: where it had a choice',
    of: (tokens, i) => tokens.entropy[i],
    has: tokens => tokens.entropy,
  },
  gap: {
    signed: true,
    about: 'log p of the trainer minus log p of the sampler, before the step trained',
    of: (tokens, i) => tokens.gap[i],
    has: tokens => tokens.gap,
  },
  ratio: {
    signed: true,
    about: 'p of the trainer / p of the sampler, before the step trained; the scale is its logarithm',
    of: (tokens, i) => tokens.gap[i],
    has: tokens => tokens.gap,
    shown: value => `${+Math.exp(value).toPrecision(6)}`,
  },
};

const isTrained = (tokens, i) => tokens.sampler[i] !== null;

function valueOf(name, tokens, i) {
  if (!COLOURS[name].has(tokens) || !isTrained(tokens, i)) return null;
  const value = COLOURS[name].of(tokens, i);
  return isNumber(value) ? value : null;
}

const shownValue = (name, value) => (COLOURS[name].shown || (COLOURS[name].signed ? signed : short))(value);

// The tokens of a sample: of its reply, or of an agent's replies.
const tokensIn = sample => [sample.tokens, ...sample.tree.map(node => node.tokens)].filter(tokens => tokens.lengths);
const coloursOf = allTokens => Object.keys(COLOURS).filter(name => allTokens.some(COLOURS[name].has));

// The value with the full colour, the same for all samples, so that they compare: 99 of 100 tokens are below.
const scales = {};
function scaleOf(name) {
  if (scales[name] === undefined) {
    const sizes = [];
    for (const sample of samples)
      for (const tokens of tokensIn(sample))
        for (let i = 0; i < tokens.lengths.length; i++) {
          const value = valueOf(name, tokens, i);
          if (value) sizes.push(Math.abs(value));
        }
    sizes.sort((a, b) => a - b);
    scales[name] = sizes[Math.floor(0.99 * (sizes.length - 1))] || 1;
  }
  return scales[name];
}

function paint(name, value) {
  if (value === null || !name) return '';
  const share = Math.min(1, Math.abs(value) / scaleOf(name));
  const full = !COLOURS[name].signed ? '--one' : value < 0 ? '--below' : '--above';
  return `background: color-mix(in oklab, var(${full}) ${Math.round(share * 100)}%, transparent)`;
}

// The text of a reply, cut into its tokens; what is behind the tokens with numbers follows as it is. A line break that
// is a token of its own has a sign, so that its colour can be seen.
function tokenSpans(text, tokens, name) {
  const spans = [];
  let end = 0;
  tokens.lengths.forEach((length, i) => {
    const said = visible(text.slice(end, end += length));
    const value = name ? valueOf(name, tokens, i) : null;
    const span = make('span', { 'data-i': i, style: paint(name, value) }, /^\n+$/.test(said) ? '↵' + said : said);
    if (!isTrained(tokens, i)) span.className = 'untrained';
    spans.push(span);
  });
  return [...spans, visible(text.slice(end))];
}

// A reply whose tokens can be walked through, by pointing, by touch, and with the arrow keys: the line at the bottom of
// the reader has the numbers of one.
function tokenText(text, tokens, name) {
  if (!tokens.lengths) return make('pre', {}, visible(text));
  const pre = make('pre', { class: 'tokens', tabindex: 0, 'aria-label': 'reply, token by token' },
    ...tokenSpans(text, tokens, name));
  let current = null;
  const show = span => {
    current?.classList.remove('current');
    current = span;
    current.classList.add('current');
    const i = +span.dataset.i;
    const facts = coloursOf([tokens]).map(each => {
      const value = valueOf(each, tokens, i);
      return value === null ? '' : `${each} ${shownValue(each, value)}`;
    });
    $('numbers').replaceChildren(`token ${i + 1} of ${tokens.lengths.length} `,
      make('code', {}, line(span.textContent)), ' ', facts.filter(Boolean).join(' · ') || 'not sampled, or not trained');
  };
  const spanAt = event => event.target.closest('[data-i]');
  pre.onpointermove = pre.onclick = event => spanAt(event) && show(spanAt(event));
  pre.onkeydown = event => {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const next = pre.querySelector(`[data-i="${current ? +current.dataset.i + way : 0}"]`);
    if (!next) return;
    show(next);
    next.scrollIntoView({ block: 'nearest' });
  };
  return pre;
}

const line = text => visible(text.replaceAll('\n', ' ⏎ '));

function legend(name) {
  const { about, signed: hasSign } = COLOURS[name];
  const scale = scaleOf(name);
  return make('div', { class: 'legend' },
    make('span', {}, shownValue(name, hasSign ? -scale : 0)),
    make('span', { class: hasSign ? 'scale two' : 'scale' }),
    make('span', {}, shownValue(name, scale)),
    make('span', { class: 'faint' }, about));
}
