const SVG = "http://www.w3.org/2000/svg";
const ROW_HEIGHT = 14;
const ROW_GAP = 3;
const WIDTH = 1000;

// A run that crosses a row's end continues on the next row: one rectangle per row it touches.
const piecesOf = (run, perRow, end) => {
  const pieces = [];
  for (let at = run.start; at < Math.min(run.start + run.length, end);) {
    const row = Math.floor(at / perRow);
    const stop = Math.min(run.start + run.length, (row + 1) * perRow, end);
    pieces.push({ row, from: at - row * perRow, to: stop - row * perRow });
    at = stop;
  }
  return pieces;
};

const drawPool = (box, runs, data, onPick) => {
  const svg = document.createElementNS(SVG, "svg");
  const height = data.rows * (ROW_HEIGHT + ROW_GAP) - ROW_GAP;
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  svg.style.aspectRatio = `${WIDTH} / ${height}`;
  runs.forEach((run, index) => {
    for (const piece of piecesOf(run, data.per_row, data.shown_slots)) {
      const rect = document.createElementNS(SVG, "rect");
      rect.setAttribute("x", (piece.from / data.per_row) * WIDTH);
      rect.setAttribute("y", piece.row * (ROW_HEIGHT + ROW_GAP));
      rect.setAttribute("width", Math.max(((piece.to - piece.from) / data.per_row) * WIDTH, 0.75));
      rect.setAttribute("height", ROW_HEIGHT);
      rect.setAttribute("class", run.kind);
      rect.dataset.run = index;
      svg.append(rect);
    }
  });
  for (let cell = 1; cell < data.cells_per_row; cell += 1) {
    const line = document.createElementNS(SVG, "line");
    const x = (cell / data.cells_per_row) * WIDTH;
    Object.entries({ x1: x, x2: x, y1: 0, y2: height }).forEach(([name, value]) => line.setAttribute(name, value));
    svg.append(line);
  }
  svg.addEventListener("pointerover", (event) => { if (event.target.dataset.run) onPick(Number(event.target.dataset.run)); });
  box.append(svg);
};

const KIND = { "prefix-run": "Contiguous prefix", pages: "Pages", free: "Free" };
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

const sayRun = (run) => {
  const parts = [plural(run.length, "token"), `slots ${run.start.toLocaleString("en")} to ${(run.start + run.length - 1).toLocaleString("en")}`];
  if (run.node !== null) parts.unshift(`node ${run.node}`);
  if (run.users !== null) parts.push(plural(run.users, "user"));
  return [KIND[run.kind], parts.join(", ")];
};

const setUpPool = (widget) => {
  const data = { ...payload.widgets[widget.id] };
  for (const when of ["before", "after"]) {
    data[when] = data[when].map(([start, length, kind, node, users]) => ({ start, length, kind: data.kinds[kind], node, users }));
  }
  const readout = widget.querySelector(".readout");
  const boxes = { before: widget.querySelector('[data-when="before"]'), after: widget.querySelector('[data-when="after"]') };
  const pick = (when, index) => {
    const run = data[when][index];
    const [kind, rest] = sayRun(run);
    readout.replaceChildren(Object.assign(document.createElement("b"), { textContent: kind }), `: ${rest} (${when})`);
    for (const [name, box] of Object.entries(boxes)) {
      each("rect", (rect) => {
        const other = data[name][Number(rect.dataset.run)];
        const same = name === when && Number(rect.dataset.run) === index;
        rect.classList.toggle("on", same || (run.node !== null && other.node === run.node));
      }, box);
    }
  };
  for (const when of ["before", "after"]) {
    if (data[when].every((run) => run.kind === "free") && data[when].length) boxes[when].append("every slot is free");
    else if (data[when].length) drawPool(boxes[when], data[when], data, (index) => pick(when, index));
    else boxes[when].append("not recorded");
  }
  let at = -1;
  boxes.after.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!move || !data.after.length) return;
    event.preventDefault();
    at = Math.min(Math.max(at + move, 0), data.after.length - 1);
    pick("after", at);
  });
};
