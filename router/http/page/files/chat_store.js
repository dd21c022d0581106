// The chats that this browser keeps, in its local storage: one entry for each, a line that tells of it and a line with its
// turns. Bounded in number and size: the oldest go first. Several tabs may use it at once, since each writes its own chat
// only.

const PREFIX = "baton.chat.";
const OPEN = "baton.open";
export const MAX_CHATS = 50;
const MAX_CHARS = 2_000_000; // browsers give a site about five million
const PROBE = "baton.probe";

/** Whether anything can be kept here. */
export const canKeep = (() => {
  try {
    localStorage.setItem(PROBE, "1");
    localStorage.removeItem(PROBE);
    return true;
  } catch {
    return false;
  }
})();

/** {id, title, at} of each chat, newest first. */
export function keptChats() {
  if (!canKeep) return [];
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  return keys.map(describe).filter(Boolean).sort((a, b) => b.at - a.at);
}

function describe(key) {
  try {
    const [line] = localStorage.getItem(key).split("\n", 1), { title, at } = JSON.parse(line);
    return { id: key.slice(PREFIX.length), title: String(title), at: Number(at), chars: localStorage.getItem(key).length };
  } catch {
    return null; // not written by this page
  }
}

/** The turns of a chat, null when it is not here any more. */
export function loadChat(id) {
  try {
    const entry = localStorage.getItem(PREFIX + id);
    return JSON.parse(entry.slice(entry.indexOf("\n") + 1));
  } catch {
    return null;
  }
}

/** Keep a chat; whether that could be done. */
export function keepChat(id, title, turns) {
  const entry = `${JSON.stringify({ title, at: Date.now() })}\n${JSON.stringify(turns)}`;
  if (!canKeep || entry.length > MAX_CHARS) return false;
  const others = keptChats().filter((chat) => chat.id !== id);
  let chars = others.reduce((sum, chat) => sum + chat.chars, entry.length);
  const dropOldest = () => {
    const oldest = others.pop();
    chars -= oldest.chars;
    removeChat(oldest.id);
  };
  while (others.length >= MAX_CHATS || chars > MAX_CHARS) dropOldest();
  for (;;) {
    try {
      localStorage.setItem(PREFIX + id, entry);
      return true;
    } catch { // other pages of this address have taken the room
      if (!others.length) return false;
      dropOldest();
    }
  }
}

export function removeChat(id) {
  if (canKeep) localStorage.removeItem(PREFIX + id);
}

/** Calls back when another tab has changed what is kept. */
export function whenChangedElsewhere(listener) {
  addEventListener("storage", (event) => { if (!event.key || event.key.startsWith(PREFIX)) listener(); });
}

// The chat that this tab shows, so that a reload shows it again; another tab begins with a new one.

export function openChat() {
  try {
    return sessionStorage.getItem(OPEN) || "";
  } catch {
    return "";
  }
}

export function noteOpenChat(id) {
  try {
    sessionStorage.setItem(OPEN, id);
  } catch { /* then a reload begins anew */ }
}
