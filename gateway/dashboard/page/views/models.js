// Which models are served, loaded or not; for administrators also those on this machine's disk, and one more by name.

import { html, useEffect, useState } from "../parts/html.js";
import { Confirm } from "../parts/confirm.js";
import { Copy } from "../parts/copy.js";
import { Meter } from "../parts/meter.js";
import { say } from "../parts/said.js";
import { call } from "../live/api.js";
import { server } from "../live/store.js";
import { ago, bytes, count, percent, plural } from "../live/format.js";

const ASK_AGAIN_MS = 1_000;
const HUB_ID = "[A-Za-z0-9][\\w.\\-]*/[A-Za-z0-9][\\w.\\-]*";

export function Models() {
  const admin = server.value?.admin;
  const [said, setSaid] = useState(null);
  const [disk, setDisk] = useState(null);
  const ask = () => call("GET", admin ? "admin/models" : "v1/models").then(setSaid, () => setSaid(null));
  const look = () => admin && call("GET", "admin/models/cached").then(setDisk, () => setDisk(null));
  useEffect(() => {
    if (admin === undefined) return;
    ask();
    const timer = setInterval(() => document.hidden || ask(), ASK_AGAIN_MS);
    return () => clearInterval(timer);
  }, [admin]);
  useEffect(() => void look(), [admin, said?.download?.state]);
  const deed = async (method, path, body, done) => {
    try {
      await call(method, path, body);
      if (done) say(done);
    } catch (error) {
      say(error.message, true);
    }
    await ask();
  };
  if (!said) return html`<p class="hint card">The server has not said its models yet.</p>`;
  if (!("download" in said)) return html`<${Listed} models=${said.data} />`;
  return html`<${Served} models=${said.data} cached=${disk?.data ?? []} deed=${deed} /><${Disk} disk=${disk} deed=${(...them) => deed(...them).then(look)} /><${Add} it=${said.download} deed=${deed} />`;
}

// What everybody may know.
function Listed({ models }) {
  return html`<section class="card" aria-labelledby="served">
    <h2 id="served">Models</h2>
    <table class="plain"><thead><tr><th scope="col">Name</th><th scope="col">State</th><th scope="col" class="number">Context</th></tr></thead>
      <tbody>${models.map((x) => html`<tr key=${x.id}><th scope="row">${x.id}${x.id === x.root ? "" : html` <span class="faint">is ${x.root}</span>`}</th><td>${x.state}</td><td class="number">${count(x.max_model_len)}</td></tr>`)}</tbody></table>
  </section>`;
}

function Served({ models, cached, deed }) {
  const act = (verb, x) => deed("POST", `admin/models/${verb}`, { model: x.name });
  return html`<section class="card" aria-labelledby="served">
    <h2 id="served">Served models</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="Table of served models"><table class="plain models">
      <thead><tr><th scope="col">Name</th><th scope="col">State</th><th scope="col" class="number low1">Weights</th><th scope="col" class="number low2">In memory</th>
        <th scope="col" class="number low1">Sessions</th><th scope="col" class="low1">Replicas</th><th scope="col"><span class="sr">Actions</span></th></tr></thead>
      <tbody>${models.map((x) => html`<tr key=${x.name}>
        <th scope="row">${x.name || "not loaded yet"}${x.aliases.length > 0 && html` <span class="faint">also ${x.aliases.join(", ")}</span>`}</th>
        <td>${x.state.endsWith("ing") && html`<span class="spin" aria-hidden="true"></span>`}${x.state}${x.said && html`<span class="note">${x.said}</span>`}</td>
        <td class="number low1">${bytes(x.weights_bytes ?? cached.find((y) => y.served_as === x.name)?.nbytes)}</td>
        <td class="number low2">${x.held_bytes ? bytes(x.held_bytes) : "–"}</td>
        <td class="number low1">${count(x.num_sessions)}</td>
        <td class="low1">${replicas(x.replicas)}</td>
        <td>${x.on_demand && x.state === "unloaded" && !x.queued && html`<${Load} it=${x} act=${() => act("load", x)} />`}
          ${x.queued && html`<button type="button" onClick=${() => act("unload", x)}>Cancel</button>`}
          ${x.on_demand && x.state === "loaded" && html`<button type="button" disabled=${x.in_use > 0} title=${x.in_use ? `${plural(x.in_use, "request")} in flight` : ""} onClick=${() => act("unload", x)}>Unload</button>`}</td>
      </tr>`)}</tbody></table></div>
    ${!models.some((x) => x.on_demand) && html`<p class="hint">All of these stay loaded. A model with <code>load = "on-demand"</code> among the settings' <code>[[engines]]</code> is loaded when a request asks for it, or here.</p>`}
  </section>`;
}

// Where all places are taken, another model makes way.
function Load({ it, act }) {
  if (!it.displaces) return html`<button type="button" onClick=${act}>Load</button>`;
  const question = `Unload ${it.displaces} for it? There is room for one of them; its sessions are saved first.`;
  return html`<${Confirm} label="Load" question=${question} yes="Load it" no="Not now" act=${act} mild />`;
}

function replicas(them) {
  if (!them.length) return html`<span class="faint">one engine</span>`;
  const away = them.filter((x) => !x.ready);
  return html`${them.length - away.length} of ${them.length} ready${away.map((x) => html`<span class="note" key=${x.name}>${x.name}: ${x.trouble}</span>`)}`;
}

function Disk({ disk, deed }) {
  const forget = (x) => deed("DELETE", `admin/models/cached/${x.id.split("/").map(encodeURIComponent).join("/")}`, null, `${x.id} is deleted.`);
  return html`<section class="card" aria-labelledby="on-disk">
    <h2 id="on-disk">Downloaded models</h2>
    ${disk?.data.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Table of downloaded models"><table class="plain models">
      <thead><tr><th scope="col">Name</th><th scope="col" class="number">On disk</th><th scope="col" class="low1">Used</th><th scope="col"><span class="sr">Actions</span></th></tr></thead>
      <tbody>${disk.data.map((x) => html`<tr key=${x.id}><th scope="row">${x.id}</th><td class="number">${bytes(x.nbytes)}</td><td class="low1 faint">${used(x.used_at)}</td>
        <td>${x.served_as
          ? html`<span class="faint">served${x.served_as === x.id ? "" : ` as ${x.served_as}`}</span>`
          : html`<${Confirm} label="Delete" question=${`Delete ${x.id}? ${bytes(x.nbytes)} become free.`} yes="Delete it" act=${() => forget(x)} />`}</td></tr>`)}</tbody></table></div>`}
    <p class="hint">${onDisk(disk)}</p>
  </section>`;
}

function onDisk(disk) {
  if (!disk) return "Looking at the disk …";
  if (disk.problem) return `They cannot be listed: ${disk.problem}.`;
  return `${disk.data.length ? "" : "None yet. "}${bytes(disk.free_bytes)} are free.`;
}

const used = (at) => `${ago(Math.max(60, Date.now() / 1000 - at))} ago`;

function Add({ it, deed }) {
  const running = it?.state === "running";
  const submit = (event) => {
    event.preventDefault();
    deed("POST", "admin/models/download", { model: new FormData(event.target).get("model").trim() });
  };
  return html`<section class="card" aria-labelledby="add">
    <h2 id="add">Download a model</h2>
    <p class="hint">It comes onto this machine's disk. It is served once it stands in the settings and the server was started again; the lines are shown here when it is there.</p>
    <form class="filters" onSubmit=${submit}><label>Name at the hub <input name="model" required pattern=${HUB_ID} placeholder="organisation/name" disabled=${running} spellcheck="false" /></label>
      <button type="submit" disabled=${running}>Download</button></form>
    ${it && html`<${Progress} it=${it} stop=${() => deed("DELETE", "admin/models/download")} />`}
  </section>`;
}

function Progress({ it, stop }) {
  const { id, state, done_bytes: done, total_bytes: total, problem } = it;
  if (state === "running") {
    const words = total ? `${bytes(done)} of ${bytes(total)}, ${percent(done / total)}` : "asking the hub";
    return html`<div class="measuring"><p role="status"><span class="spin" aria-hidden="true"></span>${id}: ${words}</p>
      <${Meter} parts=${[{ name: id, value: done, tone: "accent" }]} total=${total || 1} words=${words} /><button type="button" onClick=${stop}>Stop</button></div>`;
  }
  if (state === "failed") {
    return html`<p class="bad" role="alert">${id} was not downloaded here: ${problem}</p>
      <p class="hint">On a machine that may, and then copied into this one's cache:</p><${Copy} label="The download as a command" text=${`hf download ${id}`} />`;
  }
  if (state === "stopped") return html`<p class="hint">The download of ${id} was stopped at ${bytes(done)}; it goes on from there.</p>`;
  return html`<p class="ok">${id} is here, but not served yet. To serve it beside the others, add these lines to the settings and start the server again:</p><${Copy} label="Settings for this model" text=${entry(id)} />
    <p class="hint">To serve it alone: <code>thermocline serve --model ${id}</code></p>`;
}

const entry = (id) => `[[engines]]
name = ${JSON.stringify(id.split("/")[1])}
model = ${JSON.stringify(id)}
load = "on-demand"`;
