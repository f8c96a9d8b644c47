// Opens pages in headless Chromium for bench/report.py: node report.mjs '{"pages": [...], "live": ..., "node": ...}'
import { createRequire } from 'node:module';
import { mkdirSync } from 'node:fs';
import { pathToFileURL } from 'node:url';

const job = JSON.parse(process.argv[2]);
const modules = job.node + '/node_modules/';
const chromium = (await import(pathToFileURL(modules + '@sparticuz/chromium/build/index.js'))).default;
const puppeteer = createRequire(modules)('puppeteer-core');
const executablePath = await chromium.executablePath();
const browser = await puppeteer.launch({ args: chromium.args, executablePath, headless: 'shell' });

async function open(path, { theme = 'light', width = 1280, height = 1000, hash = '' } = {}) {
  const page = await browser.newPage();
  const heard = [], requests = [];
  page.on('console', message => heard.push(message.text()));
  page.on('pageerror', error => heard.push(String(error)));
  page.on('dialog', dialog => { heard.push('dialog'); dialog.dismiss(); });
  page.on('request', request => requests.push(request.url()));
  await page.setViewport({ width, height });
  await page.emulateMediaFeatures([{ name: 'prefers-color-scheme', value: theme }]);
  const start = performance.now();
  await page.goto(pathToFileURL(path) + (hash && '#' + hash));
  await page.waitForSelector('html[data-drawn]', { timeout: 60000 });
  await page.evaluate(() => new Promise(done => requestAnimationFrame(() => setTimeout(done))));  // it is on the screen
  return { page, heard, requests: requests.slice(1), seconds: (performance.now() - start) / 1000 };
}

// Opens the first samples; what a reader sees, and what the text of samples must not have made.
const look = () => {
  document.querySelectorAll('#list details').forEach(node => { node.open = true; });
  return new Promise(done => setTimeout(() => done({
    title: document.title, sideways: document.documentElement.scrollWidth - innerWidth,
    kept: document.querySelector('#kept').textContent, charts: document.querySelectorAll('svg').length,
    cards: document.querySelectorAll('#list details').length,
    made_by_text: document.querySelectorAll('img, iframe, object, body script ~ script ~ script').length,
    coloured_tokens: document.querySelectorAll('pre span').length }), 300));
};

// A page that reloads itself: does it keep what the reader has set?
async function watchReload(path) {
  const { page, heard } = await open(path);
  await page.select('[name=outcome]', 'wrong');
  await page.evaluate(() => { document.querySelector('#list details').open = true; });
  await page.evaluate(() => scrollTo(0, 700));
  const before = await page.evaluate(() => location.hash);
  await page.waitForNavigation({ timeout: 20000 });
  await page.waitForSelector('html[data-drawn]');
  const after = await page.evaluate(() => ({ outcome: document.querySelector('[name=outcome]').value, scroll: scrollY,
    open: document.querySelector('#list details').open }));
  await page.close();
  return { ...after, hash_before: before, console: heard };
}

if (job.pictures) mkdirSync(job.pictures, { recursive: true });
const results = [], phone = { width: 390, height: 844 };
for (const { page: path, ...known } of job.pages) {
  const { page, heard, requests, seconds } = await open(path);
  await page.select('[name=sort]', 'gap');  // samples with tokens, where there are some, come first
  const seen = await page.evaluate(look);
  await page.close();
  results.push({ ...known, seconds_until_drawn: +seconds.toFixed(2), console: heard, requests, ...seen });
  for (const theme of job.pictures ? ['light', 'dark'] : [])
    for (const [view, options, selector] of [['top', {}, 'h1'], ['samples', { hash: 'colour=gap' }, '#samples'],
      ['timing', {}, '#timing'], ['phone', phone, 'h1'], ['phone_samples', phone, '#samples']]) {
      const { page } = await open(path, { theme, ...options });
      await page.evaluate(s => {
        const kind = document.querySelector('[name=kind]');
        if ([...kind.options].some(o => o.value === 'train, dumped')) { kind.value = 'train, dumped'; kind.oninput(); }
        const first = [...document.querySelectorAll('#list details')].slice(0, 2);
        if (s === '#samples') first.forEach(node => { node.open = true; });
        document.querySelector(s).scrollIntoView();
      }, selector);
      await new Promise(done => setTimeout(done, 200));
      await page.screenshot({ path: `${job.pictures}/${known.name.replace(' ', '_')}_${view}_${theme}.png` });
      await page.close();
    }
}
const live = await watchReload(job.live);
console.log(JSON.stringify({ browser: await browser.version(), pages: results, reloads_itself: live }));
await browser.close();
