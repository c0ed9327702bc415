// The lines that clients need to talk to this server, from the table of ``thermocline connect``.

import { signal, useEffect } from "../parts/html.js";
import { call, keyOf } from "../live/api.js";
import { server } from "../live/store.js";

// What stands in the lines for the reader's key; copied, they have the key itself.
export const KEY = "YOUR-KEY";
const listed = signal([]); // {id, name, text, notes}
let asked = "";

// The list; empty until the server has said its model and has answered.
export function useClients() {
  const it = server.value;
  const query = new URLSearchParams({
    url: new URL(".", location.href).href.replace(/\/$/, ""),
    model: it?.model ?? "MODEL",
    context: it?.max_context ?? 32768,
    key: keyOf() ? KEY : "none",
  }).toString();
  useEffect(() => {
    if (!it || query === asked) return;
    asked = query;
    call("GET", `ui/clients?${query}`).then(
      (said) => query === asked && (listed.value = said.data),
      () => (asked = ""),
    );
  }, [query]);
  return listed.value;
}
