/** One conversation: its messages, the turn under way, and what may be done with them. */

import { ApiError } from "./api.js";
import { alternatives, cutBefore, rootOf, sessionId } from "./branches.js";

/** After a stop the turn may still be leaving the server. */
const LEAVING_MS_MAX = 3000;
const LEAVING_PAUSE_MS = 150;
const FAMILY_MAX = 16;
const STOPPED = "Stopped: the session does not have this turn. Your next message goes on from here.";

/** @typedef {{id: string, name: string, arguments: string}} Call
 *  @typedef {{usage: any, timings: any, reason: string, firstMs: number, tokensPerS: number, branchOf: string}} Proof
 *  @typedef {{role: string, content: string, name?: string, reasoning?: string, calls?: Call[], tool_calls?: any[],
 *    state: "kept"|"streaming"|"stopped"|"failed", proof?: Proof, problem?: string}} Message */

export class Conversation {
  /** @param {import("./api.js").Api} api
   *  @param {import("./sessions.js").Sessions} sessions
   *  @param {(conversation: Conversation) => void} changed */
  constructor(api, sessions, changed) {
    this.#api = api;
    this.#sessions = sessions;
    this.#changed = () => changed(this);
    /** @type {string|null} null: it begins with the first message */
    this.id = null;
    /** @type {Message[]} */
    this.messages = [];
    /** @type {any} */
    this.detail = null;
    this.problem = "";
    this.loading = false;
    /** @type {{id: string, messages: any[]}[]} */
    this.family = [];
  }

  #api;
  #sessions;
  #changed;
  /** @type {AbortController|null} */
  #stopper = null;

  get busy() {
    return this.#stopper !== null;
  }

  /** What the session has. @returns {Message[]} */
  get kept() {
    return this.messages.filter((message) => message.state === "kept");
  }

  /** @param {string} id */
  async load(id) {
    this.id = id;
    this.loading = !this.messages.length;
    this.#changed();
    try {
      await this.#readDetail();
      this.messages = this.detail.messages.map((message, at) => {
        const known = this.messages[at]; // with its proof
        return known?.role === message.role && known.content === message.content ? known : asKept(message);
      });
      this.problem = "";
    } catch (error) {
      this.problem = error.message;
    }
    this.loading = false;
    this.#changed();
    await this.#readFamily();
  }

  /** @param {string} text @param {object} options of the request */
  send(text, options) {
    const fresh = this.id === null;
    if (this.id === null) this.id = sessionId(text);
    const opening = fresh && options.system ? [{ role: "system", content: options.system }] : [];
    const added = [...opening, { role: "user", content: text }];
    const stopped = this.messages.at(-1);
    if (stopped?.state !== "stopped" || !stopped.content) return this.#turn(added, options);
    // The session does not have what was stopped: the whole history says what came of it.
    for (const message of [...this.#askedBefore(this.messages.length - 1), stopped]) Object.assign(message, { state: "kept", problem: "" });
    return this.#turn(added, options, { history: sent([...this.kept, ...added]) });
  }

  /** The same question once more in the session, after a turn that it does not have.
   *  @param {number} at of the answer @param {object} options */
  again(at, options) {
    const asked = this.#askedBefore(at);
    const gone = [...asked, this.messages[at]];
    this.messages = this.messages.filter((message) => !gone.includes(message));
    return this.#turn(sent(asked), options);
  }

  /** What an answer is to: all that is said between it and the one before. @param {number} at of the answer */
  #askedBefore(at) {
    return this.messages.slice(cutBefore(this.messages, at), at);
  }

  /** A branch: a session that the server cuts off behind the last answer before `at`, and `text` in place of what
   *  followed; without it the question is asked again.
   *  @param {Conversation} into a new one @param {number} at of the message that changes @param {string|null} text @param {object} options */
  branch(into, at, text, options) {
    const before = this.messages.slice(0, at).filter((message) => message.state === "kept");
    const history = text === null ? before : [...before, { role: "user", content: text, state: "kept" }];
    const cut = cutBefore(history, history.length - 1);
    into.messages = history.slice(0, cut);
    return into.#turn(sent(history.slice(cut)), options, { branchOf: this.id ?? "", cut });
  }

  stop() {
    this.#stopper?.abort();
  }

  /** @param {number} at @returns {string[]} sessions that have another message there, this one among them */
  versions(at) {
    if (!this.id || this.messages[at].state !== "kept") return [];
    const here = this.messages.slice(0, at + 1);
    if (here.some((message) => message.state !== "kept")) return [];
    return alternatives({ id: this.id, messages: here }, this.family, at);
  }

  /** @param {{role: string, content: string}[]} added @param {object} options
   *  @param {{history?: object[], branchOf?: string, cut?: number}} branch `history`: what is sent in place of `added`;
   *    with `branchOf` the session is made first, of that one's first `cut` messages */
  async #turn(added, options, { history, branchOf = "", cut = 0 } = {}) {
    const asked = added.map((message) => ({ ...message, state: "streaming" }));
    /** @type {Message} */
    const answer = { role: "assistant", content: "", reasoning: "", calls: [], state: "streaming" };
    this.messages = [...this.messages, ...asked, answer];
    this.#stopper = new AbortController();
    this.problem = "";
    this.#changed();
    const settle = (state, problem) => {
      for (const message of [...asked, answer]) message.state = state;
      answer.problem = problem;
    };
    try {
      if (branchOf && this.id === null) {
        const made = await this.#api.post(`v1/sessions/${encodeURIComponent(branchOf)}/fork`, { messages: cut });
        this.id = made.id;
        this.#changed();
      }
      const body = { ...options.parameters, messages: history ?? added, session_id: this.id };
      await this.#streamOnceFree(body, answer, branchOf);
      settle("kept");
    } catch (error) {
      if (this.#stopper.signal.aborted) settle("stopped", STOPPED);
      else settle("failed", error.message);
    }
    this.#stopper = null;
    this.#changed();
    await Promise.all([this.#sessions.load(), answer.state === "kept" ? this.#readDetail().catch(() => {}) : null]);
    await this.#readFamily();
  }

  async #streamOnceFree(body, answer, branchOf) {
    const giveUp = Date.now() + LEAVING_MS_MAX;
    for (;;) {
      try {
        return await this.#stream(body, answer, branchOf);
      } catch (error) {
        const leaving = error instanceof ApiError && error.code === "turn_in_progress" && Date.now() < giveUp;
        if (!leaving) throw error;
      }
      await new Promise((resume) => setTimeout(resume, LEAVING_PAUSE_MS));
    }
  }

  async #stream(body, answer, branchOf) {
    const begun = performance.now();
    const proof = { usage: null, timings: null, reason: "", firstMs: 0, tokensPerS: 0, branchOf };
    const wanted = { ...body, stream: true, stream_options: { include_usage: true } };
    const signal = this.#stopper?.signal;
    for await (const event of this.#api.stream("POST", "v1/chat/completions", { body: wanted, signal })) {
      proof.firstMs ||= performance.now() - begun;
      const choice = event.choices[0];
      if (choice) {
        take(answer, choice.delta);
        proof.reason = choice.finish_reason ?? proof.reason;
      }
      if (event.usage) proof.usage = event.usage;
      if (event.timings) proof.timings = event.timings;
      if (event.branch) this.id = event.branch; // another client has gone on with the session meanwhile
      this.#changed();
    }
    const decoded = proof.usage.completion_tokens - 1;
    proof.tokensPerS = proof.timings.decode_ms > 0 ? (decoded / proof.timings.decode_ms) * 1000 : 0;
    answer.proof = proof;
  }

  async #readDetail() {
    this.detail = await this.#api.get(`v1/sessions/${encodeURIComponent(this.id)}`);
    this.#changed();
  }

  /** Its relatives' messages, to know where they part. */
  async #readFamily() {
    if (this.id === null) return;
    const root = rootOf(this.id);
    const relatives = this.#sessions.list
      .filter((session) => session.id !== this.id && !session.agent && (rootOf(session.id) === root || session.parent === root))
      .slice(0, FAMILY_MAX);
    const read = async ({ id }) => ({ id, messages: (await this.#api.get(`v1/sessions/${encodeURIComponent(id)}`)).messages });
    const found = await Promise.allSettled(relatives.map(read));
    this.family = found.filter((one) => one.status === "fulfilled").map((one) => one.value);
    this.#changed();
  }
}

/** @param {Message} answer @param {any} delta of OpenAI's chunk */
function take(answer, delta) {
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (answer.calls[part.index ?? 0] ??= { id: "", name: "", arguments: "" });
    call.id = part.id ?? call.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
}

/** @param {any} message of a session @returns {Message} */
function asKept(message) {
  const calls = (message.tool_calls ?? []).map((call) => ({ id: call.id, ...call.function }));
  return { ...message, content: message.content ?? "", reasoning: message.reasoning_content ?? "", calls, state: "kept" };
}

/** What is sent of messages: not the lines that the server itself moved. @param {Message[]} messages */
function sent(messages) {
  return messages.filter((message) => message.role !== "volatile").map(bare);
}

/** What is sent of a message. @param {Message} message */
function bare({ role, content, name, tool_calls: calls, tool_call_id: call }) {
  return { role, content, ...(name && { name }), ...(calls && { tool_calls: calls }), ...(call && { tool_call_id: call }) };
}
