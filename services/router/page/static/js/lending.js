/** Who lends to whom as a graph: instances on a circle, an arrow from each lender to each that it lends to. */

import { html, nothing, svg } from "../vendor/lit-html.js";
import { count } from "./proof.js";

const SIZE = 400;
const RADIUS = 135;
const NODE = 24;
const TIP = 15; // of an arrow, before its node
const SHOWN_MAX = 24; // more would be a tangle; the list below has all of them

/** @param {any} picture of the commons */
export function graph({ instances, loans, settlements }) {
  const ids = new Set(instances.map((one) => one.id));
  const known = loans.filter((loan) => ids.has(loan.creditor) && ids.has(loan.debtor));
  const lends = new Set(known.flatMap((loan) => [loan.creditor, loan.debtor]));
  const holders = instances
    .filter((one) => one.service === "decode" || one.service === "attention_pool")
    .sort((one, other) => lends.has(other.id) - lends.has(one.id) || one.id.localeCompare(other.id))
    .slice(0, SHOWN_MAX)
    .sort((one, other) => one.service.localeCompare(other.service) || one.id.localeCompare(other.id));
  if (!holders.length) return html`<p class="hint">No instance that has memory to lend is known.</p>`;
  const places = new Map(holders.map((one, at) => [one.id, place(at, holders.length)]));
  const drawn = known.filter((loan) => places.has(loan.creditor) && places.has(loan.debtor));
  const most = Math.max(1, ...drawn.map((loan) => loan.blocks));
  const settled = new Set(
    settlements.filter((one) => one.ended_s === null).flatMap((one) => one.legs.map((leg) => `${leg.creditor}>${leg.debtor}`)));
  return html`
    <svg class="graph" viewBox="0 0 ${SIZE} ${SIZE}" role="img" aria-labelledby="lending-words">
      <defs><marker id="tip" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="11" markerHeight="11" markerUnits="userSpaceOnUse"
        orient="auto"><path d="M0 0 L8 4 L0 8 z"></path></marker></defs>
      ${drawn.map((loan) => arrow(loan, places, most, settled.has(`${loan.creditor}>${loan.debtor}`)))}
      ${holders.map((one) => node(one, places.get(one.id)))}
    </svg>
    <div id="lending-words">${known.length
      ? html`<ul class="loans">${known.map((loan) => html`<li><b>${loan.creditor}</b> lends ${count(loan.blocks)} ${
          loan.blocks === 1 ? "block" : "blocks"} to <b>${loan.debtor}</b></li>`)}</ul>`
      : html`<p class="hint">Nobody lends to anybody: each sequence fits where it is.</p>`}</div>`;
}

function place(at, all) {
  if (all === 1) return { x: SIZE / 2, y: SIZE / 2 };
  const angle = (2 * Math.PI * at) / all - Math.PI / 2;
  return { x: SIZE / 2 + RADIUS * Math.cos(angle), y: SIZE / 2 + RADIUS * Math.sin(angle) };
}

/** Bent to the left of its way, so that what two lend each other is two arrows. */
function arrow({ creditor, debtor, blocks }, places, most, settled) {
  const from = places.get(creditor);
  const to = places.get(debtor);
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy) || 1;
  const [ux, uy] = [dx / length, dy / length];
  const bend = Math.min(40, length / 5);
  const middle = { x: (from.x + to.x) / 2 + uy * bend, y: (from.y + to.y) / 2 - ux * bend };
  const begin = toward(from, middle);
  const end = toward(to, middle, TIP);
  return svg`<g class=${settled ? "arrow settling" : "arrow"}>
    <path d=${`M${begin.x} ${begin.y} Q${middle.x} ${middle.y} ${end.x} ${end.y}`} marker-end="url(#tip)"
      stroke-width=${1.5 + (4 * blocks) / most}></path>
    <text x=${(begin.x + 2 * middle.x + end.x) / 4 + uy * 12} y=${(begin.y + 2 * middle.y + end.y) / 4 - ux * 12 + 4}>${count(blocks)}</text>
  </g>`;
}

/** Beside the node, on the way to the point. */
function toward(node, point, gap = 4) {
  const [dx, dy] = [point.x - node.x, point.y - node.y];
  const length = Math.hypot(dx, dy) || 1;
  return { x: node.x + (dx / length) * (NODE + gap), y: node.y + (dy / length) * (NODE + gap) };
}

/** A ring that is as full as its memory. */
function node(one, { x, y }) {
  const used = one.total_blocks ? (one.total_blocks - one.free_blocks) / one.total_blocks : 0;
  const around = 2 * Math.PI * NODE;
  const below = y > SIZE / 2 - 1;
  return svg`<g class=${`node ${one.service} ${one.ready ? "" : "away"}`}>
    <circle class="ring" cx=${x} cy=${y} r=${NODE}></circle>
    ${used > 0 ? svg`<circle class="filled" cx=${x} cy=${y} r=${NODE} stroke-dasharray=${`${used * around} ${around}`}
      transform=${`rotate(-90 ${x} ${y})`}></circle>` : nothing}
    <text class="share" x=${x} y=${y + 4}>${Math.round(100 * used)} %</text>
    <text class="label" x=${x} y=${below ? y + NODE + 18 : y - NODE - 9}>${short(one.id)}</text>
  </g>`;
}

/** An id fits beside its ring; the list has all of it. */
function short(id) {
  return id.length > 24 ? `${id.slice(0, 16)}…${id.slice(-6)}` : id;
}
