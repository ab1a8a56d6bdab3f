/** The proof under an answer: how soon it came, what of its prompt was not computed, and who served it. */

import { html, nothing, svg } from "../vendor/lit-html.js";

const WIDTH = 1000; // of bars, in units of their drawing

/** @param {import("./conversation.js").Proof} proof */
export function proofOf(proof) {
  const { usage, timings } = proof;
  const cached = usage.prompt_tokens_details.cached_tokens;
  return html`
    <details class="proof">
      <summary>
        <span class="fact"><b>${duration(timings.ttft_ms)}</b> to the first token</span>
        <span class="fact"><b>${count(cached)}</b> of ${count(usage.prompt_tokens)} prompt tokens from cache${
          cached ? html` <span class="tiers">${tiersIn(timings, cached)}</span>` : nothing}</span>
        ${timings.resumptions ? html`<span class="fact resumed">resumed ${times(timings.resumptions)}</span>` : nothing}
        ${proof.branchOf ? html`<span class="fact">a branch</span>` : nothing}
      </summary>
      <div class="evidence">
        ${cacheBar(usage, timings, cached)} ${timeBar(timings)}
        <dl>
          <div><dt>Prompt computed by</dt><dd>${names(timings.instances.prefill)}</dd></div>
          <div><dt>Tokens sent by</dt><dd>${path(timings.instances.decode)}</dd></div>
          <div><dt>Memory lent by</dt><dd>${names(timings.instances.holders, "nobody: all of it lay with decode")}</dd></div>
          <div><dt>Resumed on other instances</dt><dd>${timings.resumptions ? times(timings.resumptions) : "never"}</dd></div>
          <div><dt>Answer</dt><dd>${count(usage.completion_tokens)} tokens, ${proof.tokensPerS
            ? `${proof.tokensPerS.toFixed(proof.tokensPerS < 10 ? 1 : 0)} a second, ` : ""}${
            proof.reason === "length" ? "cut at its length" : "ended by the model"}</dd></div>
          <div><dt>In this browser</dt><dd>first token after ${duration(proof.firstMs)}</dd></div>
          ${proof.branchOf ? html`<div><dt>Branch of</dt><dd>${proof.branchOf}: begun anew with the history up to here, whose
            KV was found by its content</dd></div>` : nothing}
        </dl>
      </div>
    </details>`;
}

function cacheBar(usage, timings, cached) {
  const known = timings.device_tokens + timings.dram_tokens + timings.disk_tokens;
  const parts = [
    { name: "device memory", tokens: timings.device_tokens, kind: "device" },
    { name: "DRAM", tokens: timings.dram_tokens, kind: "dram" },
    { name: "disk", tokens: timings.disk_tokens, kind: "disk" },
    { name: "cache", tokens: Math.max(0, cached - known), kind: "cache" },
    { name: "computed", tokens: usage.prompt_tokens - cached, kind: "computed" },
  ];
  return bar("Where the prompt's KV came from", parts, (tokens) => `${count(tokens)} tokens`, "tokens");
}

function timeBar(timings) {
  const before = timings.queue_ms + timings.prefill_queue_ms + timings.load_wait_ms + timings.prefill_ms;
  const parts = [
    { name: "in queues", ms: timings.queue_ms + timings.prefill_queue_ms, kind: "queue" },
    { name: "loading KV", ms: timings.load_wait_ms, kind: "disk" },
    { name: "computing the prompt", ms: timings.prefill_ms, kind: "device" },
    { name: "between services", ms: Math.max(0, timings.ttft_ms - before), kind: "between" },
    { name: "generating", ms: timings.decode_ms, kind: "dram" },
    { name: "making it durable", ms: timings.commit_ms, kind: "computed" },
  ];
  return bar("Where the time went", parts, duration, "ms");
}

/** A bar of parts, and the same as a list, which is its legend. */
function bar(title, parts, written, unit) {
  const shown = parts.filter((part) => part[unit] > 0);
  const all = shown.reduce((sum, part) => sum + part[unit], 0) || 1;
  let at = 0;
  const rects = shown.map((part) => {
    const width = (part[unit] / all) * WIDTH;
    const rect = svg`<rect class=${`fill-${part.kind}`} x=${at} width=${Math.max(width - 2, 1)} height="12"></rect>`;
    at += width;
    return rect;
  });
  return html`
    <figure class="bar">
      <figcaption>${title}</figcaption>
      <svg viewBox="0 0 ${WIDTH} 12" preserveAspectRatio="none" aria-hidden="true">${rects}</svg>
      <ul class="legend">${shown.map((part) => html`<li><i class=${`dot fill-${part.kind}`}></i>${part.name}
        <b>${written(part[unit])}</b></li>`)}</ul>
    </figure>`;
}

function tiersIn(timings, cached) {
  const parts = [["memory", timings.device_tokens], ["DRAM", timings.dram_tokens], ["disk", timings.disk_tokens]];
  const shown = parts.filter(([, tokens]) => tokens > 0);
  if (shown.length === 1 && shown[0][1] === cached) return `(${shown[0][0]})`;
  return shown.length ? `(${shown.map(([name, tokens]) => `${name} ${count(tokens)}`).join(", ")})` : "";
}

function path(instances) {
  return instances.length ? instances.join(", then ") : "–";
}

function names(instances, none = "–") {
  return instances.length ? instances.join(", ") : none;
}

function times(number) {
  return number === 1 ? "once" : `${number} times`;
}

export function count(number) {
  return number.toLocaleString("en");
}

/** @param {number} ms */
export function duration(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}
