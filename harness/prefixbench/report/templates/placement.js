// The tree's nodes as the events leave them. A split shortens its node to the tokens that stay.
const nodesAfter = (events, last) => {
  const alive = new Map();
  for (const event of events.slice(0, last + 1)) {
    if (event.kind === "flush") alive.clear();
    else if (event.kind === "evict") alive.delete(event.node);
    else alive.set(event.node, { tokens: event.tokens, layout: event.layout ?? alive.get(event.node)?.layout ?? null });
  }
  return alive;
};

const stepOf = (event) => (event.kind === "place" ? event.layout : event.kind === "flush" ? "evict" : event.kind);

const setUpPlacement = (widget) => {
  const { events } = payload.widgets[widget.id];
  const slider = widget.querySelector('input[type="range"]');
  const readout = widget.querySelector(".readout");
  const list = widget.querySelector(".nodes");
  slider.max = events.length - 1;
  const go = (index) => {
    const at = Math.min(Math.max(index, 0), events.length - 1);
    const event = events[at];
    slider.value = at;
    slider.setAttribute("aria-valuetext", `event ${at + 1} of ${events.length}`);
    readout.replaceChildren(Object.assign(document.createElement("b"), { textContent: `${at + 1} of ${events.length} · ${event.title}` }), document.createElement("br"), event.detail);
    each(".flow li", (item) => item.classList.toggle("on", item.dataset.step === stepOf(event)), widget);
    list.replaceChildren(...[...nodesAfter(events, at)].slice(-120).map(([id, node]) => {
      const item = Object.assign(document.createElement("li"), { textContent: `node ${id} · ${node.tokens.toLocaleString("en")}` });
      item.className = `${node.layout ?? ""}${id === event.node ? " on" : ""}`;
      return item;
    }));
    const [first, back, next, end] = ["first", "back", "next", "last"].map((name) => widget.querySelector(`[data-go="${name}"]`));
    first.disabled = back.disabled = at === 0;
    next.disabled = end.disabled = at === events.length - 1;
  };
  const moves = { first: () => 0, back: (at) => at - 1, next: (at) => at + 1, last: () => events.length - 1 };
  each("[data-go]", (button) => button.addEventListener("click", () => go(moves[button.dataset.go](Number(slider.value)))), widget);
  slider.addEventListener("input", () => go(Number(slider.value)));
  go(0);
};
