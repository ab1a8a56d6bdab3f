/** Light, dark, or as the system has it. */

import { html } from "../vendor/lit-html.js";

const KEPT = "kvcommons-theme";
const THEMES = ["auto", "light", "dark"];
const SIGNS = { auto: "◐", light: "☀", dark: "☾" };

export class Theme {
  constructor() {
    const kept = localStorage.getItem(KEPT) ?? "";
    this.name = THEMES.includes(kept) ? kept : "auto";
    document.documentElement.dataset.theme = this.name;
  }

  next() {
    this.name = THEMES[(THEMES.indexOf(this.name) + 1) % THEMES.length];
    localStorage.setItem(KEPT, this.name);
    document.documentElement.dataset.theme = this.name;
  }
}

/** @param {Theme} theme @param {() => void} changed */
export function themeButton(theme, changed) {
  const toggle = () => {
    theme.next();
    changed();
  };
  return html`<button type="button" class="icon" title="Colours: ${theme.name}" aria-label="Colours: ${theme.name}"
    @click=${toggle}><span aria-hidden="true">${SIGNS[theme.name]}</span></button>`;
}
