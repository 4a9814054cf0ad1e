const AXIS = {
  gridcolor: "$grid", linecolor: "$muted", zerolinecolor: "$line", tickcolor: "$muted", fixedrange: true, automargin: true,
  tickfont: { size: 12, color: "$muted" }, title: { font: { size: 13, color: "$muted" }, standoff: 8 },
};
const LAYOUT = {
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: false, hovermode: "closest",
  margin: { l: 56, r: 12, t: 12, b: 44 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 13 } },
  hoverlabel: { bgcolor: "$surface", bordercolor: "$muted", font: { color: "$ink", size: 13 } },
};

const PRINT_WIDTH = 680; // fits A4 and Letter; a printed page fires no resize

const merged = (base, extra) => {
  const result = { ...base };
  for (const [key, value] of Object.entries(extra ?? {})) {
    const nested = value && typeof value === "object" && !Array.isArray(value);
    result[key] = nested ? merged(result[key] ?? {}, value) : value;
  }
  return result;
};

const show = (target, figure) => {
  const font = { family: getComputedStyle(document.body).fontFamily, color: "$ink", size: 13 };
  const layout = merged({ ...LAYOUT, font, height: 340 }, figure.layout);
  layout.width = printing ? PRINT_WIDTH : target.clientWidth;
  const narrow = layout.width < 480 ? { tickfont: { size: 10 } } : {};
  for (const key of Object.keys(layout)) {
    if (/^[xy]axis/.test(key)) layout[key] = merged(merged(AXIS, narrow), layout[key]);
  }
  for (const key of ["xaxis", "yaxis"]) layout[key] ??= AXIS;
  // On a phone the legend wraps: the chart grows by its rows, so that the plot itself keeps its height.
  const named = figure.data.filter((trace) => trace.name && trace.showlegend !== false).length;
  const rows = Math.ceil(named / Math.max(1, Math.floor(target.clientWidth / 170)));
  if (layout.showlegend !== false && named > 1) layout.height += 20 * (rows - 1);
  // Plotly writes into what it is given: it gets a copy, the payload stays as embedded.
  target.style.height = `${layout.height}px`;
  Plotly.react(target, themed(figure.data), themed(layout), { displayModeBar: false });
};

const draw = (target) => show(target, payload.figures[target.dataset.figure]);

// A picture is set up when it is first seen: a report may hold many more than it shows.
const wake = (within) => {
  each(".plot[data-figure]", (target) => { if (target.offsetParent) draw(target); }, within);
  each("[data-widget]:not([data-awake])", (widget) => {
    if (!widget.offsetParent) return;
    widget.dataset.awake = "";
    SET_UP[widget.dataset.widget](widget);
  }, within);
};

const choose = (box, chosen) => {
  each(":scope > .switch input", (input, index) => { input.checked = index === chosen; }, box);
  each(":scope > .switch select", (select) => { select.selectedIndex = chosen; }, box);
  each(":scope > .option", (option, index) => { option.hidden = index !== chosen; }, box);
  wake(box);
};

const setUpCharts = () => {
  wake(document);
  redraws.push(() => wake(document));
  let width = innerWidth; // a phone's address bar changes the height all the time; only the width matters
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    requestAnimationFrame(redraw);
  });
  each("[data-switch]", (box) => box.querySelector(":scope > .switch").addEventListener("change", ({ target }) => {
    const chosen = target.selectedIndex ?? [...box.querySelectorAll(":scope > .switch input")].indexOf(target);
    choose(box, chosen);
    if (box.dataset.group) each(`[data-group="${box.dataset.group}"]`, (other) => choose(other, chosen));
  }));
};
