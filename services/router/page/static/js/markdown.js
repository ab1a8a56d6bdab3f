/** Markdown of a model as elements of this page. Nothing in it is loaded, and nothing in it runs: HTML is shown as the
 *  text that it is, pictures as their source, and a link names where it leads and is followed by a click alone. */

import DOMPurify from "../vendor/purify.js";
import { Marked } from "../vendor/marked.js";

const TAGS = [
  "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "span",
  "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
];
const SCHEMES = /^(?:https?|mailto):/i;

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ raw }) => escaped(raw),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    link({ href, tokens, raw }) {
      if (!SCHEMES.test(href)) return escaped(raw);
      const text = this.parser.parseInline(tokens);
      const target = text === escaped(href) ? "" : ` <span class="target">(${escaped(href)})</span>`;
      return `<a href="${escaped(href)}">${text}</a>${target}`;
    },
  },
});

/** @param {string} text @returns {HTMLElement} new each time */
export function prose(text) {
  const found = DOMPurify.sanitize(marked.parse(text), {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ["href", "class", "start", "align"],
    ALLOWED_URI_REGEXP: SCHEMES,
    RETURN_DOM_FRAGMENT: true,
  });
  for (const link of found.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const block of found.querySelectorAll("pre")) {
    block.tabIndex = 0; // scrolled by keyboard
    if (navigator.clipboard) block.append(copyButton(block.textContent));
  }
  for (const table of found.querySelectorAll("table")) {
    const frame = document.createElement("div");
    frame.className = "table";
    frame.tabIndex = 0;
    table.replaceWith(frame);
    frame.append(table);
  }
  const element = document.createElement("div");
  element.className = "prose";
  element.append(found);
  return element;
}

function copyButton(text) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

/** @param {string} text */
function escaped(text) {
  const names = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return text.replace(/[&<>"']/g, (character) => names[character]);
}
