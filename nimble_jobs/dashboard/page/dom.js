// Elements from values. Text is only ever set as text; nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `null` and `false` leave a property or a child out; arrays of children are flattened. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** One of the icons in index.html. It is decoration: a word stands beside it, or its button has a label. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

// Control characters except tab and line feed, as on the command line; and those that change the direction of text
// or have no width, which could make a name look like another one.
const HIDDEN = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu;

/** Text with characters escaped that cannot be seen. */
export function visible(text) {
  return String(text).replace(HIDDEN, (found) => `\\u${found.codePointAt(0).toString(16).padStart(4, "0")}`);
}

/** Text that somebody else wrote: its direction does not spread to the text around it. */
export function said(text, className = null) {
  return h("bdi", { class: className }, visible(text));
}

/** Make `old` look like `fresh`, and keep the elements that are equal, so that focus and selection stay where they are.
 *
 * Children are matched by `data-key`, else by their place. The content of an element with `data-keep` is left alone.
 */
export function morph(old, fresh) {
  for (const { name } of [...old.attributes]) {
    const readers = name === "open" && old.tagName === "DETAILS"; // the reader has opened it
    if (!readers && !fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (!("keep" in old.dataset) || !("keep" in fresh.dataset)) morphChildren(old, fresh);
  if (old.matches("input, select") && old !== document.activeElement) old.value = fresh.value;
}

export function morphChildren(old, fresh) {
  const keyed = new Map();
  for (const child of old.children) if (child.dataset?.key) keyed.set(child.dataset.key, child);
  let place = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const key = wanted.dataset?.key;
    const same = key ? keyed.get(key) : place;
    if (same && alike(same, wanted)) {
      if (same === place) place = place.nextSibling;
      else old.insertBefore(same, place);
      if (same.nodeType === Node.TEXT_NODE) {
        if (same.data !== wanted.data) same.data = wanted.data;
      } else if (same.namespaceURI === SVG) {
        if (!same.isEqualNode(wanted)) same.replaceWith(wanted);
      } else morph(same, wanted);
    } else old.insertBefore(wanted, place);
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function alike(one, other) {
  if (one.nodeName !== other.nodeName) return false;
  return one.nodeType !== Node.ELEMENT_NODE || (one.dataset?.key ?? "") === (other.dataset?.key ?? "");
}
