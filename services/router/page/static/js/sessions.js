/** The list of the tenant's sessions. */

import { html, nothing } from "../vendor/lit-html.js";
import { branchOf, titleOf } from "./branches.js";

const PAGE = 100;
const PAGES_MAX = 10;

/** @typedef {{id: string, last_used_at: number, version: number, parent: string|null, agent: string|null, cut: number|null, model: string|null}} Session */

export class Sessions {
  /** @param {import("./api.js").Api} api @param {() => void} changed */
  constructor(api, changed) {
    this.#api = api;
    this.#changed = changed;
    /** @type {Session[]} used last first */
    this.list = [];
    this.more = false;
    this.loaded = false;
    /** @type {string} */
    this.problem = "";
  }

  #api;
  #changed;

  get ids() {
    return this.list.map((session) => session.id);
  }

  async load() {
    /** @type {Session[]} */
    const found = [];
    let after = "";
    try {
      for (let page = 0; page < PAGES_MAX; page += 1) {
        const query = after ? `&after=${encodeURIComponent(after)}` : "";
        const reply = await this.#api.get(`v1/sessions?limit=${PAGE}${query}`);
        found.push(...reply.data);
        this.more = reply.has_more;
        if (!reply.has_more) break;
        after = reply.last_id;
      }
      this.list = found.sort((one, other) => other.last_used_at - one.last_used_at);
      this.problem = "";
      this.loaded = true;
    } catch (error) {
      this.problem = error.message;
    }
    this.#changed();
  }

  /** @param {string} id */
  async delete(id) {
    await this.#api.delete(`v1/sessions/${encodeURIComponent(id)}`);
    await this.load(); // its branches are gone, too
  }
}

/** @param {Sessions} sessions @param {string|null} current @param {(id: string) => void} forget */
export function sessionList(sessions, current, forget) {
  return html`
    <nav class="sessions" aria-label="Sessions" @keydown=${moveByArrows}>
      <a class="new" href="#/chat" aria-current=${current === null ? "page" : nothing}>
        <span aria-hidden="true">+</span> New conversation</a>
      ${sessions.problem ? html`<p class="problem" role="alert">${sessions.problem}</p>` : nothing}
      <ul>
        ${sessions.list.map(
          (session) => html`
            <li class=${session.id === current ? "current" : ""}>
              <a href=${`#/chat/${encodeURIComponent(session.id)}`} title=${session.id}
                aria-current=${session.id === current ? "page" : nothing}>
                <span class="title">${titleOf(session.id)}</span>
                <span class="when">${branchOf(session.id) ? html`<b>${branchOf(session.id)}</b>, ` : nothing}${ago(session.last_used_at)}${session.cut === null ? `, ${turns(session.version)}` : ""}${
                  session.parent && !branchOf(session.id) ? html`, ${session.agent ? "agent of" : "from"} ${titleOf(session.parent)}` : nothing}</span>
              </a>
              <button type="button" class="forget" aria-label=${`Delete ${titleOf(session.id)} ${branchOf(session.id)}`}
                @click=${() => forget(session.id)}>×</button>
            </li>`,
        )}
      </ul>
      ${sessions.loaded && !sessions.list.length ? html`<p class="hint">No session yet.</p>` : nothing}
      ${sessions.more ? html`<p class="hint">The first ${sessions.list.length} by id; there are more.</p>` : nothing}
    </nav>`;
}

/** Up and down go from link to link. @param {KeyboardEvent} event */
function moveByArrows(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  const links = [...event.currentTarget.querySelectorAll("a")];
  const next = links[links.indexOf(document.activeElement) + step];
  if (!next) return;
  event.preventDefault();
  next.focus();
}

function turns(count) {
  return count === 1 ? "1 turn" : `${count} turns`;
}

/** @param {number} since Unix seconds */
function ago(since) {
  const seconds = Math.max(0, Date.now() / 1000 - since);
  if (seconds < 60) return "now";
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
  }
  return "now";
}
