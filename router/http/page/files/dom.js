// Small helpers over the document. What comes from models or the router is only ever put in as text, never as markup; the
// page's content policy (trusted types) holds every script to that. Styles are set as properties, never as attributes.

export const $ = (id) => document.getElementById(id);

export function make(tag, className = "", text = "") {
  const found = document.createElement(tag);
  if (className) found.className = className;
  if (text) found.textContent = text;
  return found;
}

/** A quiet button. `label`: what a screen reader says, where the text alone does not tell. */
export function makeButton(text, onClick, label = "") {
  const button = make("button", "quiet", text);
  button.type = "button";
  if (label) button.setAttribute("aria-label", label);
  button.addEventListener("click", () => onClick(button));
  return button;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Give `parent` one child per item, and show each item in its child. Children are used again. */
export function fill(parent, items, create, update) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  items.forEach((item, index) => {
    if (!parent.children[index]) parent.append(create());
    update(parent.children[index], item);
  });
}

export const count = (number) => number.toLocaleString("en");

export const seconds = (value) => value === null || value === undefined ? "–"
  : value < 0.0995 ? `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms` : `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
