/** The commons: pictures of the whole stack as they come, and how they are shown. */

import { html, nothing } from "../vendor/lit-html.js";
import { ApiError } from "./api.js";
import { graph } from "./lending.js";
import { count } from "./proof.js";

const AGAIN_MS = [500, 1000, 2000, 5000];
const SAID_EVERY_MS = 15_000;
// Heartbeats come every half second, and a ledger tells of them within two more.
const STALE_S = 4;

const KINDS = [
  ["router", "Routers"], ["prefill", "Prefill"], ["prefill_stage", "Stages of prefill"], ["decode", "Decode"],
  ["decode_stage", "Stages of decode"], ["attention_pool", "Attention pools"], ["kvstore", "Kvstores"], ["ledger", "Ledgers"],
];
const STEPS = ["prepare", "freeze", "copy", "switch", "release", "end"];
const STEP_WORDS = {
  prepare: "blocks are set aside", freeze: "the round is agreed", copy: "KV is copied home", switch: "debtors switch to the copies",
  release: "creditors' blocks come free", end: "what was set aside is given back",
};

/** What the server says of the whole stack, for as long as it is looked at. */
export class Commons {
  /** @param {import("./api.js").Api} api @param {() => void} changed */
  constructor(api, changed) {
    this.#api = api;
    this.#changed = changed;
    /** @type {any} the last picture */
    this.picture = null;
    this.live = false;
    this.problem = "";
    this.said = ""; // to those who do not see the screen
  }

  #api;
  #changed;
  /** @type {AbortController|null} */
  #stopper = null;
  #saidAt = 0;

  /** @param {boolean} watched whether the view is on the screen */
  watch(watched) {
    if (watched === (this.#stopper !== null)) return;
    this.#stopper?.abort();
    this.#stopper = null;
    this.live = false;
    if (watched) this.#follow((this.#stopper = new AbortController()));
  }

  /** Until it is stopped: a stream that breaks is opened again, a refused one is not. */
  async #follow(stopper) {
    const { signal } = stopper;
    for (let failures = 0; !signal.aborted; failures += 1) {
      try {
        for await (const picture of this.#api.stream("GET", "v1/commons?stream=true", { signal })) {
          if (signal.aborted) return;
          failures = 0;
          this.#take(picture);
        }
      } catch (error) {
        if (signal.aborted) return;
        this.live = false;
        this.problem = error.message;
        this.#changed();
        if (error instanceof ApiError && [400, 401, 403].includes(error.status)) {
          this.#stopper = null;
          return;
        }
      }
      const pause = AGAIN_MS[Math.min(failures, AGAIN_MS.length - 1)];
      await new Promise((resume) => setTimeout(resume, pause));
    }
  }

  #take(picture) {
    this.picture = picture;
    this.live = true;
    this.problem = "";
    if (Date.now() - this.#saidAt > SAID_EVERY_MS) {
      this.#saidAt = Date.now();
      this.said = summaryOf(picture);
    }
    this.#changed();
  }
}

/** The whole of it in a sentence. */
function summaryOf({ instances, sequences, loans, settlements }) {
  const ready = instances.filter((one) => one.ready).length;
  const lent = loans.reduce((sum, loan) => sum + loan.blocks, 0);
  const running = settlements.filter((one) => one.ended_s === null).length;
  return `${ready} of ${instances.length} instances are ready, ${count(sequences.length)} sequences are under way, ${
    count(lent)} blocks are lent, ${running} settlements run.`;
}

/** @param {Commons} commons */
export function commonsView(commons) {
  const { picture, problem, live } = commons;
  return html`
    <main class="commons" id="main" tabindex="-1">
      <h1 class="visually-hidden">The commons</h1>
      <p class="visually-hidden" role="status" aria-live="polite">${commons.said}</p>
      ${problem ? html`<p class="problem" role="alert">${problem}${picture && !live ? " What is below is from before." : ""}</p>` : nothing}
      ${picture ? shown(picture) : problem ? nothing : html`<p class="hint middle">Asking the services…</p>`}
    </main>`;
}

function shown(picture) {
  return html`
    ${figures(picture)}
    <div class="rooms">
      <div class="wing">
        ${section("lending", "Who lends to whom", [graph(picture), unanswered(picture.instances)])}
        ${section("tiers", "Tiers of the kvstore", tiers(picture.tiers))}
      </div>
      <div class="wing">
        ${section("settlements", "Settlements", settlements(picture.settlements))}
        ${section("sequences", "Sequences, and where their KV lies", sequences(picture))}
        ${section("objectives", "Objectives", objectives(picture.classes))}
      </div>
      ${section("services", "Services", services(picture.instances))}
    </div>`;
}

/** Of whom memory and loans are older than the rest of the picture. */
function unanswered(instances) {
  return instances.filter((one) => one.answers === false).map((one) => html`<p class="problem">${
    one.id} does not answer: its memory and what it lends are as it said ${
    one.silent_s === null ? "last" : `${Math.round(one.silent_s)} s ago`}.</p>`);
}

function section(name, title, content) {
  return html`<section class="room ${name}" aria-labelledby="room-${name}"><h2 id="room-${name}">${title}</h2>${content}</section>`;
}

function figures({ queue, sequences, sequences_left_out: more, loans, instances }) {
  const lent = loans.reduce((sum, loan) => sum + loan.blocks, 0);
  const holders = instances.filter((one) => one.service === "decode");
  const total = holders.reduce((sum, one) => sum + one.total_blocks, 0);
  const free = holders.reduce((sum, one) => sum + one.free_blocks, 0);
  const tiles = [
    ["sequences under way", sequences.length + more],
    ["waiting in the queue", queue.waiting],
    ["waiting for room", queue.waiting_for_room],
    ["blocks lent", lent],
    ["of decode's memory used", total ? `${Math.round((100 * (total - free)) / total)} %` : "–"],
    ...(queue.documents ? [["documents on their way", queue.documents]] : []),
  ];
  return html`<dl class="figures">${tiles.map(([name, value]) => html`<div><dt>${name}</dt><dd>${
    typeof value === "number" ? count(value) : value}</dd></div>`)}</dl>`;
}

function services(instances) {
  return KINDS.map(([service, title]) => {
    const found = instances.filter((one) => one.service === service);
    if (!found.length) return nothing;
    return html`<h3>${title}</h3><ul class="instances">${found.map(instance)}</ul>`;
  });
}

function instance(one) {
  const used = one.total_blocks - one.free_blocks;
  const work = [
    one.running ? `${count(one.running)} running` : "",
    one.queued ? `${count(one.queued)} queued` : "",
    one.lendable_blocks ? `${count(one.lendable_blocks)} to lend` : "",
    one.silent_s > STALE_S ? `as it said ${Math.round(one.silent_s)} s ago` : "",
  ].filter(Boolean);
  return html`<li class=${one.ready ? "" : "away"}>
    <span class="name">${one.id}</span>
    <span class="hint">${[one.ready ? "" : "not ready", one.host, one.model, one.group, ...work].filter(Boolean).join(", ")}</span>
    ${one.total_blocks ? meter(used, one.total_blocks, "device", "blocks of KV used") : nothing}
  </li>`;
}

function meter(value, max, kind, what) {
  const share = max ? Math.min(100, (100 * value) / max) : 0;
  return html`<span class="meter" role="meter" aria-valuemin="0" aria-valuemax=${max} aria-valuenow=${value} aria-label=${what}>
    <svg viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true"><rect class=${`fill-${kind}`} width=${share} height="6"></rect></svg>
    <span class="value" aria-hidden="true">${count(value)} of ${count(max)}</span></span>`;
}

function tiers(found) {
  if (!found.length) return html`<p class="hint">No kvstore is known.</p>`;
  return html`<ul class="instances">${found.map((one) => html`<li>
    <span class="name">${one.kvstore}</span>
    ${one.dram_blocks === null ? html`<span class="problem">does not answer</span>` : html`
      <span class="hint">${count(one.sessions)} ${one.sessions === 1 ? "session" : "sessions"}${
        one.pending_writes ? `, ${count(one.pending_writes)} ${one.pending_writes === 1 ? "block" : "blocks"} on the way to disk` : ""}</span>
      <span class="tier">DRAM ${meter(one.dram_blocks, one.dram_capacity_blocks, "dram", "blocks in DRAM")}</span>
      <span class="tier">Disk ${meter(one.disk_blocks, one.disk_capacity_blocks, "disk", "blocks on disk")}</span>`}
  </li>`)}</ul>`;
}

const PHASES = {
  waiting: "waits for room", computing: "prompt is computed", generating: "generating", resuming: "resumes elsewhere",
};

function sequences({ sequences: found, sequences_left_out: more }) {
  if (!found.length) return html`<p class="hint">None is under way at this router.</p>`;
  return html`<ol class="sequence-list">${found.map(sequence)}</ol>
    ${more ? html`<p class="hint">And ${count(more)} more.</p>` : nothing}`;
}

function sequence(one) {
  const all = one.holders.reduce((sum, held) => sum + held.blocks, 0) || 1;
  const parts = one.holders.map((held, number) => html`<span class="part ${number ? "lent" : "own"}"
    title=${`${held.instance}: ${held.blocks} blocks`} .style=${`flex-grow:${held.blocks}`}></span>`);
  return html`<li class=${one.phase}>
    <span class="name">${one.name}</span> <span class="hint">${PHASES[one.phase]}, ${count(one.tokens)} tokens (${
      count(one.prompt_tokens)} of the prompt)${one.resumptions ? `, resumed ${one.resumptions} times` : ""}</span>
    ${one.holders.length ? html`<div class="strip" aria-hidden="true">${parts}</div>
      <span class="hint held">${one.holders.map((held, number) => `${held.instance} ${count(held.blocks)}${
        number ? " lent" : ""}`).join(", ")} of ${count(all)} blocks</span>` : nothing}
  </li>`;
}

function settlements(found) {
  if (!found.length) return html`<p class="hint">None within the last minute: nobody's debts run in a circle.</p>`;
  return html`<ol class="settlement-list">${[...found].reverse().map(settlement)}</ol>`;
}

function settlement(one) {
  const running = one.ended_s === null;
  const at = STEPS.indexOf(one.step);
  const settled = one.legs.reduce((sum, leg) => sum + leg.settled_blocks, 0);
  return html`<li class=${running ? "running" : "ended"}>
    <span class="name">${one.legs.map((leg) => leg.debtor).join(" → ")} → ${one.legs[0]?.debtor}</span>
    <span class="hint">${running ? `round ${one.round}: ${STEP_WORDS[one.step]}` : `ended ${Math.round(one.ended_s)} s ago after ${
      one.round} ${one.round === 1 ? "round" : "rounds"}`}, ${count(settled)} blocks came home</span>
    ${running ? html`<ol class="steps" aria-label="Steps">${STEPS.map((step, number) => html`<li
      class=${number < at ? "done" : number === at ? "now" : ""} aria-current=${number === at ? "step" : nothing}>${step}</li>`)}</ol>` : nothing}
    <ul class="legs">${one.legs.map((leg) => html`<li>${leg.debtor} from ${leg.creditor}: ${count(leg.settled_blocks)} home${
      leg.left_blocks ? `, ${count(leg.left_blocks)} left` : ""}</li>`)}</ul>
  </li>`;
}

function objectives(classes) {
  return html`<div class="table" tabindex="0" role="region" aria-label="Classes of service"><table>
    <thead><tr><th scope="col">class</th><th scope="col">first token</th><th scope="col">between tokens</th><th scope="col">met</th>
      <th scope="col">missed</th><th scope="col">refused</th><th scope="col">best effort</th></tr></thead>
    <tbody>${classes.map((one) => html`<tr><th scope="row">${one.name}</th><td>${promised(one.ttft_s)}</td><td>${promised(one.tbt_s)}</td>
      <td>${count(one.met)}</td><td class=${one.missed ? "missed" : ""}>${count(one.missed)}</td><td>${count(one.refused)}</td>
      <td>${count(one.best_effort)}</td></tr>`)}</tbody></table></div>`;
}

function promised(seconds) {
  if (seconds === null) return "–";
  return seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds} s`;
}
