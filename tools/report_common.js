'use strict';
// What all parts of the page share: its data, its state, and how text becomes part of it.

const $ = id => document.getElementById(id);
const isNumber = Number.isFinite;
let data;  // tools/report.py, page_data

// ------------------------------------------------------------------------------------------------------------- state
// Filters, the open sample and the scroll are in the address: a reload and a copied address keep them.

const state = new URLSearchParams(location.hash.slice(1));
const get = name => state.get(name) || '';

function set(name, value) {
  if (value) state.set(name, value);
  else state.delete(name);
  history.replaceState(null, '', '#' + state);
}

// -------------------------------------------------------------------------------------------------------------- text

const SVG_TAGS = ['svg', 'path', 'line', 'text', 'circle', 'g', 'title'];

// Strings become text nodes: no text is ever read as HTML.
function make(tag, attributes = {}, ...children) {
  const isSvg = SVG_TAGS.includes(tag);
  const node = isSvg ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag);
  for (const name in attributes) node.setAttribute(name, attributes[name]);
  node.append(...children);
  return node;
}

function makeButton(text, onclick, attributes = {}) {
  const button = make('button', { type: 'button', ...attributes }, text);
  button.onclick = onclick;
  return button;
}

// Control characters, marks of direction and halves of characters are shown as their code points.
const visible = text => String(text).replace(/(?![\n\t\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029]/gu,
  c => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, '0')}⟩`);

function short(value) {
  if (!isNumber(value)) return visible(value || 'none');
  const size = Math.abs(value);
  return size >= 1e5 || (size && size < 1e-3) ? value.toExponential(1) : `${+value.toPrecision(4)}`;
}

const signed = value => isNumber(value) && value > 0 ? `+${short(value)}` : short(value).replace('-', '\u2212');

// Colours of curves: the same number has the same colour in every chart.
const colour = i => i < 8 ? `var(--c${i})` : `hsl(${i * 137.5} 45% 55%)`;
