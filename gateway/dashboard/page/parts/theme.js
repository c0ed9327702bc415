// Light or dark: as the system has it, unless the reader chose.

import { html, signal } from "./html.js";

const KEY = "thermocline-theme";
const ORDER = ["", "light", "dark"];
const NAMES = { "": "System", light: "Light", dark: "Dark" };
const system = matchMedia("(prefers-color-scheme: dark)");
const chosen = signal(localStorage.getItem(KEY) ?? "");
export const theme = signal("");

function apply() {
  document.documentElement.dataset.theme = chosen.value;
  theme.value = chosen.value || (system.matches ? "dark" : "light");
}

system.addEventListener("change", apply);
apply();

export function ThemeSwitch() {
  const next = () => {
    chosen.value = ORDER[(ORDER.indexOf(chosen.value) + 1) % ORDER.length];
    if (chosen.value) localStorage.setItem(KEY, chosen.value);
    else localStorage.removeItem(KEY);
    apply();
  };
  const name = NAMES[chosen.value];
  return html`<button type="button" class="quiet" onClick=${next} title="Colours: system, light, dark">
    <span aria-hidden="true">${theme.value === "dark" ? "☾" : "☀"}</span>
    <span class="sr">Colours: </span><span class="theme">${name}</span>
  </button>`;
}
