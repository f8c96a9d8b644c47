// Unpacks the data, draws all parts, and listens.

function start() {
  prepareSamples();
  $('about').textContent = `Written ${data.time}${data.live ? '; reloads itself while the run goes on' : ''}`;
  $('kept').textContent = data.runs.map(run => `${visible(run.name)}: ${run.kept}`).join(' · ');
  const nav = document.querySelector('nav');
  nav.append(...[...document.querySelectorAll('h2')].map(title =>
    makeButton(title.id, () => title.scrollIntoView({ behavior: 'smooth' }))));
  fillChoices();
  listenToInputs();
  listenToKeys();
  $('more').onclick = showMore;
  nav.hidden = false;
  document.querySelector('main').hidden = false;
  for (const draw of [drawRuns, drawCurves, drawPhases, drawSamples]) draw();
  scrollTo(0, +get('scroll'));
  document.documentElement.dataset.drawn = Math.round(performance.now());
  if (data.live) setInterval(reload, data.live * 1000);
}

function fillChoices() {
  for (const name of CHOICES) {
    const select = document.getElementsByName(name)[0];
    const values = [...new Set(samples.map(sample => sample[name]))];
    select.append(make('option', { value: '' }, `every ${name === 'env_name' ? 'environment' : name}`),
      ...values.map(value => make('option', { value }, visible(value) || 'unknown')));
    select.hidden = values.length < 2 && !get(name);
  }
}

function listenToInputs() {
  for (const input of document.querySelectorAll('input, select')) {
    input.value = get(input.name) || input.value;
    input.oninput = () => {
      set(input.name, input.value);
      if (['metric', 'smooth'].includes(input.name)) drawCurves();
      else drawSamples();
    };
    if (input.tagName === 'SELECT') input.onchange = () => input.blur();  // done: the page may reload itself
  }
}

// j and k: the next and the previous sample. Arrows do the same in the list. Escape closes the reader.
function listenToKeys() {
  document.addEventListener('keydown', event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const isTyping = event.target.matches('input, select, textarea');
    const isInList = $('list').contains(event.target);
    if (event.key === 'Escape' && get('open') && !isTyping) {
      const item = $('list').querySelector('[aria-current]');
      open(null);
      item?.focus();
    }
    const way = { j: 1, k: -1, ...(isInList && { ArrowDown: 1, ArrowUp: -1 }) }[event.key];
    if (!way || isTyping) return;
    event.preventDefault();
    openNeighbour(way);
    if (isInList) $('list').querySelector('[aria-current]')?.focus();
  });
}

function reload() {
  const isAtWork = document.activeElement.closest('input, select, #reader') || `${getSelection()}`;
  if (isAtWork) return;
  set('scroll', Math.round(scrollY));
  location.reload();
}

const bytes = Uint8Array.from(atob($('data').textContent), c => c.charCodeAt(0));
new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'))).json().then(
  unpacked => { data = unpacked; start(); },
  error => { $('about').textContent = `The data cannot be unpacked: ${error}`; });
