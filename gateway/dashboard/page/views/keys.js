// API keys, for administrators: made, listed, revoked. A key is shown once and never again.

import { html, useEffect, useState } from "../parts/html.js";
import { Confirm } from "../parts/confirm.js";
import { Copy } from "../parts/copy.js";
import { say } from "../parts/said.js";
import { call } from "../live/api.js";

export function Keys() {
  const [keys, setKeys] = useState(null);
  const [made, setMade] = useState("");
  const load = () => call("GET", "admin/keys").then((said) => setKeys(said.data ?? said), () => setKeys(null));
  useEffect(() => void load(), []);
  const deed = async (what, done) => {
    try {
      const said = await what();
      say(done);
      await load();
      return said;
    } catch (error) {
      say(error.message, true);
    }
  };
  const create = async (event) => {
    event.preventDefault();
    const tenant = new FormData(event.target).get("tenant").trim();
    const said = await deed(() => call("POST", "admin/keys", { tenant }), `A key for ${tenant} is made.`);
    if (said) setMade(said.key);
  };
  if (!keys) return "";
  return html`<section class="card" aria-labelledby="keys">
    <h2 id="keys">API keys</h2>
    ${keys.length === 0
      ? html`<p class="hint">No key is needed: every caller is the one local tenant.</p>`
      : html`<div class="scroll" tabindex="0" role="region" aria-label="API keys"><table class="plain"><thead><tr><th scope="col">Key</th><th scope="col">Tenant</th><th scope="col">Limits</th><th scope="col"><span class="sr">Actions</span></th></tr></thead><tbody>
          ${keys.map((x) => html`<tr key=${x.id}><th scope="row"><code>${x.id}</code></th><td>${x.tenant}${x.admin ? html` <span class="client">admin</span>` : ""}</td><td class="faint">${limits(x.limits)}</td>
            <td>${x.kept_in === "file" && html`<${Confirm} label="Revoke" question=${`Revoke ${x.id}?`} yes="Revoke it" act=${() => deed(() => call("DELETE", `admin/keys/${encodeURIComponent(x.id)}`), "The key is revoked.")} />`}</td></tr>`)}
        </tbody></table></div>`}
    ${keys.length > 0 && html`<form class="filters" onSubmit=${create}><label>Tenant <input name="tenant" required pattern="[A-Za-z0-9][A-Za-z0-9._\\-]*" maxlength="64" /></label><button type="submit">Make a key</button></form>`}
    ${made && html`<${Copy} label="The new key, shown this once" text=${made} />`}
  </section>`;
}

const limits = (x) =>
  Object.entries(x ?? {}).filter(([, n]) => n).map(([name, n]) => `${n} ${name.replaceAll("_", " ")}`).join(", ") || "the usual ones";
