/** Branches: sessions that begin with the same messages. An edit or a new answer begins a session with the history up to
 *  there; its KV is found by its content, and the first session stays as it was. */

/** Of a branch: the id of the session that it came from, "~" and a number. */
const BRANCH = /^(.+)~(\d+)$/;

/** @param {string} id @returns {string} the session from which it branched, and all its relatives did */
export function rootOf(id) {
  return BRANCH.exec(id)?.[1] ?? id;
}

/** A branch begins behind an answer. @param {{role: string}[]} messages @param {number} at of the one that changes
 *  @returns {number} how many messages are before the cut */
export function cutBefore(messages, at) {
  return messages.slice(0, at).findLastIndex((message) => message.role === "assistant") + 1;
}

/** @param {string} id @returns {string} how a list names it */
export function titleOf(id) {
  const branch = BRANCH.exec(id);
  const words = /^([a-z0-9]+(?:-[a-z0-9]+)*)-[a-z0-9]{5}$/.exec(branch?.[1] ?? id)?.[1];
  const title = words ? words[0].toUpperCase() + words.slice(1).replaceAll("-", " ") : (branch?.[1] ?? id);
  return title;
}

/** @param {string} id @returns {string} the branch that it is; empty for what none is known of */
export function branchOf(id) {
  const number = BRANCH.exec(id)?.[2];
  return number ? `branch ${number}` : "";
}

/** @param {string} text of its first message @returns {string} of a new session: a few of its words, and a random part */
export function sessionId(text) {
  const words = text.normalize("NFKD").toLowerCase().match(/[a-z0-9]+/g) ?? [];
  const name = words.slice(0, 6).join("-").slice(0, 48).replace(/-$/, "") || "chat";
  const random = crypto.getRandomValues(new Uint8Array(5));
  return `${name}-${[...random].map((byte) => (byte % 36).toString(36)).join("")}`;
}

/** The sessions among `family` that agree with the messages before `at` and have another one there, and the current one,
 *  by their ids.
 *  @param {{id: string, messages: {role: string, content: string}[]}} current
 *  @param {{id: string, messages: {role: string, content: string}[]}[]} family
 *  @param {number} at @returns {string[]} one id for each different message */
export function alternatives(current, family, at) {
  const here = current.messages;
  const found = new Map([[key(here[at]), current.id]]);
  for (const other of family) {
    if (!other.messages[at] || here.slice(0, at).some((message, i) => key(message) !== key(other.messages[i]))) continue;
    if (!found.has(key(other.messages[at]))) found.set(key(other.messages[at]), other.id);
  }
  return [...found.values()].sort(byAge);
}

/** @param {{role: string, content: string}|undefined} message */
function key(message) {
  return message ? `${message.role}\n${message.content}` : "";
}

function byAge(one, other) {
  const number = (id) => Number(BRANCH.exec(id)?.[2] ?? 1);
  return number(one) - number(other);
}
