// The page of a Baton router: a chat over /v1/chat/completions, and a view of the relay over /page/events. This file puts
// the parts together; each of the others has one concern.

import { Chat } from "./chat.js";
import { ChatList } from "./chat_list.js";
import { openChat } from "./chat_store.js";
import { prepareComposer } from "./composer.js";
import { prepareConfirm } from "./confirm.js";
import { prepareKey } from "./key.js";
import { prepareLayout } from "./layout.js";
import { loadModels, prepareOptions } from "./options.js";
import { showRelay } from "./relay.js";
import { watchRelay } from "./relay_stream.js";

prepareLayout();
prepareConfirm();
prepareOptions();
const shownBefore = openChat();
const chat = new Chat((isKept) => list.tell(isKept));
const list = new ChatList(chat);
if (shownBefore && chat.open(shownBefore)) list.show();
prepareComposer(chat);
prepareKey();
addEventListener("pagehide", () => chat.leave());
addEventListener("pageshow", () => chat.comeBack());
watchRelay(() => loadModels().catch(() => {}), showRelay);
