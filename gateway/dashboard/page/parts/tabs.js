// Tabs as WAI-ARIA has them: one stop for the Tab key, arrows between them.

import { html, useEffect, useRef } from "./html.js";

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

// tabs: [{name, label, badge}]
export function Tabs({ tabs, chosen, choose, label, panel }) {
  const list = useRef(null);
  useEffect(() => list.current?.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest", inline: "nearest" }), [chosen]);
  const onKeyDown = (event) => {
    const at = tabs.findIndex((x) => x.name === chosen);
    let to = at + (STEPS[event.key] ?? 0);
    if (event.key === "Home") to = 0;
    if (event.key === "End") to = tabs.length - 1;
    if (to === at) return;
    event.preventDefault();
    const { name } = tabs[(to + tabs.length) % tabs.length];
    list.current.querySelector(`#${panel}-tab-${CSS.escape(name)}`).focus();
    choose(name);
  };
  return html`<div role="tablist" aria-label=${label} class="tabs" ref=${list} onKeyDown=${onKeyDown}>
    ${tabs.map(
      (x) => html`<button
        key=${x.name}
        role="tab"
        type="button"
        id=${`${panel}-tab-${x.name}`}
        aria-controls=${panel}
        aria-selected=${x.name === chosen ? "true" : "false"}
        tabindex=${x.name === chosen ? 0 : -1}
        onClick=${() => choose(x.name)}
      >
        ${x.label}${x.badge ? html` <span class="badge">${x.badge}</span>` : ""}
      </button>`,
    )}
  </div>`;
}
