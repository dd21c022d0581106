// Small values that this browser keeps. Where it keeps nothing they are forgotten, which harms nobody.

export function readKept(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

export function writeKept(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch { /* it is forgotten */ }
}
