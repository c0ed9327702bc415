// Preact, its hooks and signals, and htm's tag for writing elements: one import for every view.

import { Component, Fragment, h, render } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export { Fragment, render };
export * from "../vendor/preact-hooks.js";
export { computed, effect, signal, useComputed, useSignal } from "../vendor/signals.js";
export const html = htm.bind(h);

// A view that is drawn again only for other properties, or when a signal that it has read changes.
export function once(View) {
  return class extends Component {
    shouldComponentUpdate(next) {
      return Object.keys(next).some((name) => next[name] !== this.props[name]);
    }

    render(properties) {
      return View(properties);
    }
  };
}
