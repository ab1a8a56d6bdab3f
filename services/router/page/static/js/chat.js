/** The chat view: a conversation and the field to write in. */

import { html, nothing } from "../vendor/lit-html.js";
import { titleOf } from "./branches.js";
import { prose } from "./markdown.js";
import { count, proofOf } from "./proof.js";

const NEAR_PX = 120;

export class Chat {
  /** @param {() => void} changed */
  constructor(changed) {
    this.#changed = changed;
    /** @type {import("./conversation.js").Message|null} the question that is being edited */
    this.editing = null;
    this.draft = "";
    this.said = ""; // to those who do not see the screen
    /** @type {WeakMap<object, {text: string, element: HTMLElement}>} */
    this.#rendered = new WeakMap();
  }

  #changed;
  #rendered;

  /** A message's markdown; made anew when its text has changed. */
  prose(message) {
    const kept = this.#rendered.get(message);
    if (kept?.text === message.content) return kept.element;
    const element = prose(message.content);
    this.#rendered.set(message, { text: message.content, element });
    return element;
  }

  edit(message) {
    this.editing = message;
    this.draft = message?.content ?? "";
    this.#changed();
  }
}

/** @param {Chat} chat
 *  @param {import("./conversation.js").Conversation} conversation
 *  @param {{options: import("./options.js").Options, go: (id: string) => void, branch: () => import("./conversation.js").Conversation,
 *    shown: () => import("./conversation.js").Conversation}} page `branch` makes a conversation and shows it */
export function chatView(chat, conversation, { options, go, branch, shown }) {
  const start = (turn) => {
    if (conversation.busy) return;
    chat.edit(null);
    turn();
    if (shown().id) go(shown().id);
    follow(true);
  };
  const context = { chat, conversation, options, go, start, branch };
  const empty = !conversation.messages.length && !conversation.loading;
  return html`
    <main class="chat" id="main">
      <div class="scroll" id="scroll" tabindex="-1">
        ${conversation.problem ? html`<p class="problem" role="alert">${conversation.problem}</p>` : nothing}
        ${empty ? welcome(conversation) : nothing}
        ${empty ? nothing : html`<h1 class="visually-hidden">${titleOf(conversation.id ?? "")}</h1>`}
        <div role="log" aria-label="Conversation" aria-live="off" aria-busy=${conversation.busy}>
          <ol class="messages">${conversation.messages.map((message, at) => messageView(message, at, context))}</ol>
        </div>
      </div>
      <p class="visually-hidden" role="status" aria-live="polite">${chat.said}</p>
      ${composer(context)}
    </main>`;
}

function welcome(conversation) {
  if (conversation.id !== null) return html`<p class="hint middle">This session has no message yet.</p>`;
  return html`
    <div class="welcome">
      <h1>A conversation that survives</h1>
      <p>What you say here is kept by the server, and so is the KV cache that the model made of it. Close the tab, restart
        the machines: the next message goes on from there, and the line under each answer says what was not computed again.</p>
    </div>`;
}

function messageView(message, at, context) {
  const { chat } = context;
  if (message.role === "system") {
    return html`<li class="message system"><details><summary>System message</summary>${chat.prose(message)}</details></li>`;
  }
  if (message.role === "volatile") {
    return html`<li class="message system"><details><summary>Lines moved from the head of the request</summary><pre tabindex="0">${message.content}</pre></details></li>`;
  }
  if (message.role === "tool") {
    return html`<li class="message tool"><details><summary>Result of a tool</summary><pre tabindex="0">${message.content}</pre></details></li>`;
  }
  return message.role === "user" ? question(message, at, context) : answer(message, at, context);
}

function question(message, at, context) {
  const { chat, conversation, options, start, branch } = context;
  if (chat.editing === message) {
    const submit = (event) => {
      event.preventDefault();
      const text = chat.draft.trim();
      if (text) start(() => conversation.branch(branch(), at, text, options.request()));
    };
    return html`
      <li class="message user editing">
        <form @submit=${submit}>
          <label class="visually-hidden" for="edit">Edit your message</label>
          <textarea id="edit" rows="3" .value=${chat.draft} @input=${(event) => (chat.draft = event.target.value)}
            @keydown=${(event) => editKeys(event, submit, () => chat.edit(null))}></textarea>
          <p class="hint">Sending makes a branch: this conversation stays as it is, and the new one shares its KV up to here.</p>
          <div class="actions"><button type="submit" class="primary">Send as a branch</button>
            <button type="button" @click=${() => chat.edit(null)}>Cancel</button></div>
        </form>
      </li>`;
  }
  return html`
    <li class="message user ${message.state}">
      <article aria-label="You">
        <div class="bubble">${message.content}</div>
        <div class="actions">
          ${versions(message, at, context)}
          ${message.state === "kept" ? action("Edit", () => openEditor(chat, message), conversation.busy) : nothing}
        </div>
      </article>
    </li>`;
}

function answer(message, at, context) {
  const { chat, conversation, options, start, branch } = context;
  const streaming = message.state === "streaming";
  const undone = message.state === "stopped" || message.state === "failed";
  return html`
    <li class="message assistant ${message.state}">
      <article aria-label="The model" aria-busy=${streaming}>
        ${message.reasoning ? html`<details class="reasoning" ?open=${streaming && !message.content}>
          <summary>Reasoning</summary><div class="plain">${message.reasoning}</div></details>` : nothing}
        ${message.content ? chat.prose(message) : nothing}
        ${streaming && !message.content && !message.reasoning ? html`<p class="waiting"><span class="visually-hidden">The model
          begins</span><i></i><i></i><i></i></p>` : nothing}
        ${(message.calls ?? []).filter(Boolean).map(callView)}
        ${message.problem ? html`<p class=${message.state === "failed" ? "problem" : "hint"}>${message.problem}</p>` : nothing}
        ${message.proof ? proofOf(message.proof) : nothing}
        <div class="actions">
          ${versions(message, at, context)}
          ${undone ? action("Ask again", () => start(() => conversation.again(at, options.request())), conversation.busy) : nothing}
          ${message.state === "kept"
            ? html`${action("Regenerate", () => start(() => conversation.branch(branch(), at, null, options.request())), conversation.busy)}
                ${navigator.clipboard ? action("Copy", () => navigator.clipboard.writeText(message.content)) : nothing}`
            : nothing}
        </div>
      </article>
    </li>`;
}

function callView(call) {
  let written = call.arguments;
  try {
    written = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    // as far as it has come
  }
  return html`<details class="call"><summary>Calls <code>${call.name}</code></summary><pre tabindex="0">${written}</pre></details>`;
}

/** Which of several branches is seen, and the way to the others. */
function versions(message, at, { conversation, go }) {
  if (conversation.busy || message.state !== "kept") return nothing;
  const ids = conversation.versions(at);
  if (ids.length < 2) return nothing;
  const here = ids.indexOf(conversation.id);
  const to = (step, sign, label) => html`<button type="button" class="step" aria-label=${label} ?disabled=${!ids[here + step]}
    @click=${() => go(ids[here + step])}>${sign}</button>`;
  return html`<span class="versions" title=${titleOf(conversation.id)}>${to(-1, "‹", "The branch before")}<span
    aria-label=${`Branch ${here + 1} of ${ids.length}`}>${here + 1}/${ids.length}</span>${to(1, "›", "The next branch")}</span>`;
}

function action(name, does, disabled = false) {
  return html`<button type="button" class="quiet" ?disabled=${disabled} @click=${does}>${name}</button>`;
}

function composer({ chat, conversation, options, start }) {
  const field = () => /** @type {HTMLTextAreaElement} */ (document.getElementById("say"));
  const submit = (event) => {
    event.preventDefault();
    const text = field().value.trim();
    if (!text || conversation.busy) return;
    field().value = "";
    fit(field());
    start(() => conversation.send(text, options.request()));
  };
  return html`
    <form class="composer" @submit=${submit}>
      <label class="visually-hidden" for="say">Your message</label>
      <div class="field">
        <textarea id="say" rows="1" placeholder="Say something" enterkeyhint="send" autocomplete="off"
          @input=${(event) => fit(event.target)} @keydown=${(event) => sayKeys(event, submit)}></textarea>
        ${conversation.busy
          ? html`<button type="button" class="primary stop" @click=${() => conversation.stop()}><span aria-hidden="true">■</span> Stop</button>`
          : html`<button type="submit" class="primary"><span aria-hidden="true">↑</span> Send</button>`}
      </div>
      <div class="under">
        ${options.view()}
        ${conversation.detail ? sessionFacts(conversation) : html`<span class="hint keys"><kbd>Enter</kbd> sends,
          <kbd>Shift Enter</kbd> a new line, <kbd>Esc</kbd> stops</span>`}
      </div>
    </form>`;
}

function sessionFacts({ detail }) {
  const { tiers, tokens, blocks } = detail;
  const lies = tiers && blocks ? [[tiers.dram, "in DRAM"], [tiers.disk, "on disk"], [tiers.absent, "to compute again"]] : [];
  const parts = lies.filter(([number]) => number).map(([number, where]) => `${count(number)} ${where}`);
  return html`<span class="hint" title=${detail.id}>${count(tokens)} tokens${
    parts.length ? `, ${count(blocks)} blocks of KV: ${parts.join(", ")}` : ""}</span>`;
}

function sayKeys(event, submit) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
}

function editKeys(event, submit, cancel) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  if (event.key === "Escape") {
    event.stopPropagation();
    cancel();
  }
}

async function openEditor(chat, message) {
  chat.edit(message);
  await new Promise(requestAnimationFrame);
  const field = /** @type {HTMLTextAreaElement|null} */ (document.getElementById("edit"));
  field?.focus();
  field?.setSelectionRange(field.value.length, field.value.length);
}

/** As high as its text, up to a third of the window. */
function fit(field) {
  const lines = field.value.split("\n").reduce((sum, line) => sum + Math.max(1, Math.ceil(line.length / 90)), 0);
  field.rows = Math.min(Math.max(lines, 1), 10);
}

/** Keeps the end in sight, unless the reader has scrolled away from it. Call it before a render; what it returns, after.
 *  @param {boolean} always */
export function follow(always = false) {
  const box = document.getElementById("scroll");
  const near = always || !box || box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_PX;
  const down = () => {
    const now = document.getElementById("scroll");
    if (near && now) now.scrollTop = now.scrollHeight;
  };
  if (always) requestAnimationFrame(() => requestAnimationFrame(down));
  return down;
}
