const amdahl = (f, s) => 1 / (1 - f + f / s);

const setUpAmdahl = (widget) => {
  const data = payload.widgets[widget.id];
  const f = widget.querySelector(`[id="${widget.id}-f"]`);
  const s = widget.querySelector(`[id="${widget.id}-s"]`);
  const out = (name) => widget.querySelector(`[data-out="${name}"]`);
  const plot = widget.querySelector(".plot");
  s.max = Math.max(50, Math.ceil(data.s * 1.5));
  const update = () => {
    const share = Number(f.value);
    const faster = Number(s.value);
    const speedup = amdahl(share, faster);
    out("f").textContent = `${format(100 * share, 1)}%`;
    out("s").textContent = `${format(faster, 1)}×`;
    out("speedup").textContent = `${format(speedup)}×`;
    out("limit").textContent = `at most ${format(1 / (1 - share))}× however fast that share becomes`;
    const from = Math.min(1, data.slowest);
    const xs = Array.from({ length: 81 }, (_, i) => from * (Number(s.max) / from) ** (i / 80));
    show(plot, {
      data: [
        { x: xs, y: xs.map((x) => amdahl(share, x)), mode: "lines", name: `predicted at f = ${format(100 * share, 1)}%`, line: { color: "$ink", width: 2 }, hovertemplate: "s %{x:.1f}×: whole step %{y:.2f}×<extra></extra>" },
        { x: [faster], y: [speedup], mode: "markers", name: "your setting", marker: { color: "$ink", size: 13, symbol: "circle-open", line: { width: 3 } }, hovertemplate: "%{y:.2f}×<extra>your setting</extra>" },
        ...data.measured,
      ],
      layout: {
        xaxis: { type: "log", title: { text: "speed-up of the prefix share, s" }, tickvals: [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500], ticksuffix: "×" },
        yaxis: { title: { text: "speed-up of the whole step" }, ticksuffix: "×", rangemode: "tozero" },
      },
    });
  };
  const reset = () => { f.value = data.f; s.value = data.s; update(); };
  f.addEventListener("input", update);
  s.addEventListener("input", update);
  widget.querySelector('[data-go="reset"]').addEventListener("click", reset);
  redraws.push(update);
  reset();
};
