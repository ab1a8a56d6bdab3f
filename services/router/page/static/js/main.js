/** The page: what is shown, by the address behind the hash. Wiring only. */

import { html, nothing, render } from "../vendor/lit-html.js";
import { Api, Key } from "./api.js";
import { titleOf } from "./branches.js";
import { Chat, chatView, follow } from "./chat.js";
import { Commons, commonsView } from "./commons.js";
import { Conversation } from "./conversation.js";
import { Options } from "./options.js";
import { Sessions, sessionList } from "./sessions.js";
import { Theme, themeButton } from "./theme.js";

const CONVERSATIONS_MAX = 50; // that the page remembers

class Page {
  constructor() {
    this.key = new Key();
    this.wantsKey = false;
    this.keyProblem = "";
    this.menu = false;
    this.theme = new Theme();
    const draw = () => this.draw();
    this.api = new Api(this.key, () => this.askForKey());
    this.sessions = new Sessions(this.api, draw);
    this.options = new Options(draw);
    this.chat = new Chat(draw);
    this.commons = new Commons(this.api, draw);
    /** @type {Conversation[]} newest first */
    this.conversations = [];
    this.conversation = this.newConversation();
    this.due = false;
  }

  start() {
    addEventListener("hashchange", () => this.route());
    document.addEventListener("visibilitychange", () => this.route());
    addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      if (this.menu) this.showMenu(false);
      else this.conversation.stop();
    });
    this.route();
    this.refresh();
  }

  async refresh() {
    try {
      const models = await this.api.get("v1/models");
      this.options.models = models.data.map((model) => model.id);
    } catch {
      // the list of sessions says what is wrong
    }
    await this.sessions.load();
  }

  get view() {
    return location.hash.startsWith("#/commons") ? "commons" : "chat";
  }

  /** The session that the address names; null: none. */
  get addressed() {
    const id = /^#\/chat\/(.+)$/.exec(location.hash)?.[1];
    return id ? decodeURIComponent(id) : null;
  }

  route() {
    this.menu = false;
    this.commons.watch(this.view === "commons" && !document.hidden && !this.wantsKey);
    if (this.view === "chat" && this.addressed !== this.conversation.id) {
      this.chat.edit(null);
      this.show(this.addressed);
    }
    this.draw();
  }

  /** The session's conversation as this page knows it, with its proofs; a turn under way goes on unseen. */
  show(id) {
    const known = this.conversations.find((one) => one.id === id && id !== null);
    this.conversation = known ?? this.newConversation();
    if (id === null) requestAnimationFrame(() => document.getElementById("say")?.focus());
    else if (!this.conversation.busy) this.conversation.load(id).then(() => follow(true));
  }

  newConversation() {
    const made = new Conversation(this.api, this.sessions, (one) => {
      if (one !== this.conversation) return;
      if (one.id !== null && this.view === "chat" && one.id !== this.addressed) this.go(one.id);
      this.tell(one);
      this.draw();
    });
    this.conversations = [made, ...this.conversations].slice(0, CONVERSATIONS_MAX);
    return made;
  }

  /** For those who do not see the screen: that it begins, and the whole of it at its end. */
  tell(conversation) {
    const last = conversation.messages.at(-1);
    if (last?.role !== "assistant" || !this.chat) return;
    const said = { streaming: "The model answers.", kept: last.proof ? `The model said: ${last.content}` : "", failed: last.problem };
    this.chat.said = said[last.state] ?? last.problem ?? "";
  }

  go(id) {
    const hash = id ? `#/chat/${encodeURIComponent(id)}` : "#/chat";
    if (location.hash !== hash) location.hash = hash;
  }

  askForKey() {
    this.wantsKey = true;
    this.commons.watch(false);
    this.keyProblem = this.key.value ? "The server does not know this key." : "";
    this.draw();
  }

  takeKey(event) {
    event.preventDefault();
    const field = event.target.elements.key;
    this.key.value = field.value.trim();
    field.value = "";
    this.wantsKey = false;
    this.route();
    this.refresh();
    if (this.conversation.id) this.conversation.load(this.conversation.id);
  }

  async forget(id) {
    if (!confirm(`Delete the session “${titleOf(id)}”? Its messages and its branches cannot be had again.`)) return;
    try {
      await this.sessions.delete(id);
      if (id === this.conversation.id) this.go("");
    } catch (error) {
      this.sessions.problem = error.message;
      this.draw();
    }
  }

  showMenu(shown) {
    this.menu = shown;
    this.draw();
    if (!shown) document.getElementById("menu")?.focus();
  }

  draw() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      const down = follow();
      render(this.template(), document.body);
      down();
      document.title = this.view === "commons" ? "The commons – kvcommons"
        : this.conversation.id ? `${titleOf(this.conversation.id)} – kvcommons` : "kvcommons";
      const dialog = /** @type {HTMLDialogElement|null} */ (document.getElementById("key"));
      if (dialog && !dialog.open) dialog.showModal();
    });
  }

  template() {
    return html`
      <a class="skip" href="#main" @click=${skip}>To the content</a>
      <header class="top">
        <button type="button" class="icon menu" id="menu" aria-label="Sessions" aria-expanded=${this.menu}
          aria-controls="side" @click=${() => this.showMenu(!this.menu)}><span aria-hidden="true">☰</span></button>
        <a class="brand" href="#/chat"><img src="page/icon.svg" alt="" width="22" height="22"> kvcommons</a>
        <nav class="views" aria-label="Views">
          <a href=${this.conversation.id ? `#/chat/${encodeURIComponent(this.conversation.id)}` : "#/chat"}
            aria-current=${this.view === "chat" ? "page" : nothing}>Chat</a>
          <a href="#/commons" aria-current=${this.view === "commons" ? "page" : nothing}>Commons</a>
        </nav>
        ${themeButton(this.theme, () => this.draw())}
      </header>
      <div class="body view-${this.view} ${this.menu ? "menu-open" : ""}">
        <aside class="side" id="side">
          ${sessionList(this.sessions, this.conversation.id, (id) => this.forget(id))}
        </aside>
        <div class="shade" @click=${() => this.showMenu(false)}></div>
        ${this.view === "commons" ? commonsView(this.commons) : chatView(this.chat, this.conversation, {
          options: this.options,
          go: (id) => this.go(id),
          branch: () => (this.conversation = this.newConversation()),
          shown: () => this.conversation,
        })}
      </div>
      ${this.wantsKey ? this.keyDialog() : nothing}`;
  }

  keyDialog() {
    return html`
      <dialog id="key" aria-labelledby="key-title" @cancel=${(event) => event.preventDefault()}>
        <form @submit=${(event) => this.takeKey(event)}>
          <h2 id="key-title">This server asks for a key</h2>
          <p>It stays in this tab until you close it, and goes to this server alone.</p>
          ${this.keyProblem ? html`<p class="problem" role="alert">${this.keyProblem}</p>` : nothing}
          <label for="key-field">API key</label>
          <input id="key-field" name="key" type="password" required autocomplete="off" spellcheck="false">
          <button type="submit" class="primary">Use it</button>
        </form>
      </dialog>`;
  }
}

function skip(event) {
  event.preventDefault();
  const main = document.getElementById("main");
  main?.setAttribute("tabindex", "-1");
  main?.focus();
}

new Page().start();
