// The list of the chats that are kept: open one, begin one, delete one or all.

import { $, fill, make, makeButton, setText } from "./dom.js";
import { canKeep, keptChats, MAX_CHATS, removeChat, whenChangedElsewhere } from "./chat_store.js";
import { confirmed } from "./confirm.js";
import { closeOverChat } from "./layout.js";

const KEPT = `The last ${MAX_CHATS} chats are kept, in this browser only.`;
const NOT_KEPT = "This browser keeps nothing for this page: a chat is gone when you reload or close it.";
const TOO_LARGE = "This chat is too large to be kept: it is gone when you reload or close it.";

/** The list beside `chat`. */
export class ChatList {
  constructor(chat) {
    this._chat = chat;
    $("new-chat").addEventListener("click", () => this._leave(() => chat.begin()));
    $("delete-all").addEventListener("click", () => this._deleteAll());
    whenChangedElsewhere(() => this.show());
    this.tell(true);
  }

  show() {
    const chats = keptChats();
    fill($("chat-list"), chats, () => make("li"), (item, chat) => this._showItem(item, chat));
    $("delete-all").hidden = !chats.length;
  }

  /** Say whether the chat that is open is kept. */
  tell(isKept) {
    setText($("kept"), !canKeep ? NOT_KEPT : isKept ? KEPT : TOO_LARGE);
    $("not-kept").hidden = canKeep && isKept;
    setText($("not-kept"), canKeep ? TOO_LARGE : NOT_KEPT);
    this.show();
  }

  _showItem(item, chat) {
    if (item.dataset.id !== chat.id || item.dataset.title !== chat.title) {
      item.dataset.id = chat.id;
      item.dataset.title = chat.title;
      const open = makeButton(chat.title, () => this._leave(() => this._chat.open(chat.id)));
      open.className = "open";
      open.title = chat.title;
      item.replaceChildren(open, makeButton("×", () => this._delete(chat), `Delete the chat: ${chat.title}`));
    }
    if (chat.id === this._chat.id) item.firstElementChild.setAttribute("aria-current", "true");
    else item.firstElementChild.removeAttribute("aria-current");
  }

  /** Show another chat; an answer that is being written is stopped and kept. */
  async _leave(show) {
    await this._chat.stop();
    show();
    this.tell(true);
    closeOverChat();
    $("prompt").focus();
  }

  async _delete(chat) {
    if (!await confirmed(`Delete “${chat.title}”?`)) return;
    await this._remove([chat.id]);
  }

  async _deleteAll() {
    const ids = keptChats().map((chat) => chat.id);
    if (await confirmed(ids.length === 1 ? "Delete the only chat?" : `Delete all ${ids.length} chats?`)) await this._remove(ids);
  }

  async _remove(ids) {
    const isOpen = ids.includes(this._chat.id);
    if (isOpen) await this._chat.stop();
    for (const id of ids) removeChat(id);
    if (isOpen) this._chat.begin();
    this.tell(true);
    $("new-chat").focus();
  }
}
