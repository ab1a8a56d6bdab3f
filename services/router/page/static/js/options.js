/** What each request asks for, beside its messages. Kept for the browser's session. */

import { html, nothing } from "../vendor/lit-html.js";

const KEPT = "kvcommons-options";

export class Options {
  /** @param {() => void} changed */
  constructor(changed) {
    this.#changed = changed;
    /** @type {string[]} that are served */
    this.models = [];
    this.values = { model: "", temperature: "", maxTokens: "", system: "", ...JSON.parse(sessionStorage.getItem(KEPT) ?? "{}") };
  }

  #changed;

  /** For a conversation's next turn. */
  request() {
    const { model, temperature, maxTokens, system } = this.values;
    const parameters = {
      ...(this.models.includes(model) && { model }),
      ...(temperature !== "" && { temperature: Number(temperature) }),
      ...(maxTokens !== "" && { max_tokens: Number(maxTokens) }),
    };
    return { parameters, system: system.trim() };
  }

  #set(name, value) {
    this.values = { ...this.values, [name]: value };
    sessionStorage.setItem(KEPT, JSON.stringify(this.values));
    this.#changed();
  }

  view() {
    const { values, models } = this;
    const set = (name) => (event) => this.#set(name, event.target.value);
    return html`
      <details class="options">
        <summary>${values.model || models[0] || "no model is ready"}</summary>
        <div class="fields">
          ${models.length > 1
            ? html`<label>Model <select @change=${set("model")}>${models.map(
                (model) => html`<option ?selected=${model === values.model}>${model}</option>`)}</select></label>`
            : nothing}
          <label>Temperature <input type="number" min="0" max="2" step="0.1" placeholder="1" .value=${values.temperature}
            @change=${set("temperature")}></label>
          <label>Tokens at most <input type="number" min="1" step="1" placeholder="as many as fit" .value=${values.maxTokens}
            @change=${set("maxTokens")}></label>
          <label class="wide">System message of new conversations
            <textarea rows="2" .value=${values.system} @change=${set("system")}></textarea></label>
        </div>
      </details>`;
  }
}
