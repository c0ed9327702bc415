// What each tenant has and uses, for administrators.

import { html } from "../parts/html.js";
import { bytes, count, percent, plural, seconds } from "../live/format.js";

export function Tenants({ tenants }) {
  if (tenants.length < 2) return "";
  return html`<section class="card" aria-labelledby="tenants">
    <h2 id="tenants">Tenants</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="All tenants"><table class="plain">
      <thead><tr><th scope="col">Tenant</th><th scope="col" class="number">Sessions</th><th scope="col" class="number low1">Hot</th>
        <th scope="col" class="number low1">Cold</th><th scope="col">Now</th><th scope="col" class="number">Tokens, last hour</th>
        <th scope="col" class="number">Share</th><th scope="col" class="number low2">Waited (p95)</th></tr></thead>
      <tbody>${tenants.map(
        (x) => html`<tr key=${x.name}>
          <th scope="row">${x.name}</th>
          <td class="number">${count(x.sessions)}</td>
          <td class="number low1">${bytes(x.hot_bytes)}</td>
          <td class="number low1">${bytes(x.cold_bytes)}</td>
          <td>${now(x)}</td>
          <td class="number">${count(x.tokens_last_hour)}</td>
          <td class="number">${percent(x.share)}</td>
          <td class="number low2">${seconds(x.wait_p95_s)}</td>
        </tr>`,
      )}</tbody>
    </table></div>
  </section>`;
}

function now({ running, waiting }) {
  const words = [running && `${count(running)} in flight`, waiting && `${plural(waiting, "turn")} waiting`].filter(Boolean);
  return words.join(", ") || html`<span class="faint">–</span>`;
}
