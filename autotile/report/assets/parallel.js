"use strict";
/* Parallel coordinates on a canvas: Plotly's own need WebGL and code that the pages' policies forbid. Ranges are selected
   by dragging along an axis, or by the fields below, which the keyboard reaches.

   `page` has what the page provides: `themed(value)` and `colour(role)` for the theme, and `select(place, tests)`, which
   is called with the selected ranges, each a name and a test of a value; it may be left out. */
const Parallel = (() => {
  const element = (name, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };

  /* Numbers that Plotly stores as bytes. */
  const ARRAYS = {
    i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array,
    f4: Float32Array, f8: Float64Array,
  };
  function numbers(values) {
    if (Array.isArray(values)) return values;
    const bytes = Uint8Array.from(atob(values.bdata), (one) => one.charCodeAt(0));
    return new ARRAYS[values.dtype](bytes.buffer);
  }

  const short = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}\u2026` : text);

  return class {
    constructor(place, figure, page) {
      this.place = place;
      this.page = page;
      this.canvas = element("canvas");
      this.canvas.setAttribute("aria-hidden", "true");
      this.status = element("p", { className: "note" });
      this.status.setAttribute("aria-live", "polite");
      this.brushes = element("div", { className: "brushes" });
      this.load(figure);
      place.classList.add("parallel");
      place.replaceChildren(this.canvas, this.status, this.brushes);
      place.setAttribute("role", "group");
      this.listen();
      this.resizer = new ResizeObserver(() => this.paint());
      this.resizer.observe(place);
      this.paint();
      place.dataset.drawn = "1";
    }

    /* Draw another figure of the same kind; the ranges that are selected stay. */
    update(figure) {
      const before = new Map(this.axes.map((axis) => [axis.name, axis]));
      const focused = this.axes.findIndex((axis) => axis.select === document.activeElement);
      this.load(figure);
      for (const axis of this.axes) {
        const old = before.get(axis.name);
        if (!old?.range) continue;
        if (axis.isNumber) {
          axis.select.value = old.select.value;
          axis.range = axis.select.value === "" ? old.range : [axis.low, axis.cuts[Number(axis.select.value)]];
          continue;
        }
        const names = old.names.filter((_, code) => code >= old.range[0] && code <= old.range[1]);
        const codes = names.map((text) => axis.names.indexOf(text)).filter((code) => code >= 0); // values may be new
        if (!codes.length) continue;
        axis.range = [Math.min(...codes) - 0.5, Math.max(...codes) + 0.5];
        if (old.select.value !== "") axis.select.value = String(codes[0]);
      }
      if (focused >= 0) this.axes[focused]?.select.focus();
      this.paint();
    }

    load(figure) {
      const trace = figure.data.find((one) => one.type === "parcoords");
      this.axes = trace.dimensions.map((one, index) => this.axis(one, figure.layout.meta.axes[index]));
      this.colours = numbers(trace.line.color);
      this.scale = trace.line.colorscale;
      this.order = [...this.colours.keys()].sort((a, b) => this.colours[b] - this.colours[a]);
      this.rank = new Float64Array(this.order.length); // 0 for the fastest: times have a long tail, ranks do not
      this.order.forEach((line, place) => { this.rank[line] = 1 - place / Math.max(1, this.order.length - 1); });
      this.height = figure.layout.height;
      this.brushes.replaceChildren(...this.fields());
    }

    close() { this.resizer.disconnect(); this.abort.abort(); }

    axis(dimension, meta) {
      const values = numbers(dimension.values);
      let [low, high] = dimension.range ?? [Math.min(...values), Math.max(...values)];
      if (low === high) { low -= 0.5; high += 0.5; }
      const isNumber = !dimension.ticktext;
      const ticks = isNumber ? [low, (low + high) / 2, high] : dimension.tickvals;
      const isLog = isNumber && low > 0 && high > 3 * low;
      if (isLog) ticks[1] = Math.sqrt(low * high);
      const texts = isNumber ? ticks.map((one) => one.toLocaleString("en", { maximumSignificantDigits: 4 }))
        : ticks.map((code) => meta.values[code]);
      return { name: meta.name, values, low, high, ticks, texts, isNumber, isLog, names: meta.values, range: null };
    }

    fields() {
      const made = [];
      for (const axis of this.axes) {
        const names = axis.names ?? this.quantiles(axis);
        const select = element("select", {}, element("option", { value: "", textContent: "all" }));
        names.forEach((text, index) => select.append(element("option", { value: String(index), textContent: text })));
        select.addEventListener("change", () => {
          const index = Number(select.value);
          if (select.value === "") axis.range = null;
          else axis.range = axis.isNumber ? [axis.low, axis.cuts[index]] : [index - 0.5, index + 0.5];
          this.changed();
        });
        axis.select = select;
        made.push(element("label", {}, axis.name, select));
      }
      const clear = element("button", { type: "button", textContent: "Clear" });
      clear.addEventListener("click", () => { for (const axis of this.axes) axis.range = null; this.changed(true); });
      made.push(clear);
      return made;
    }

    quantiles(axis) {
      const sorted = [...axis.values].sort((a, b) => a - b);
      axis.cuts = [0.01, 0.05, 0.25, 0.5].map((share) => sorted[Math.floor(share * (sorted.length - 1))]);
      return ["fastest 1 %", "fastest 5 %", "fastest quarter", "fastest half"];
    }

    listen() {
      this.abort = new AbortController();
      const signal = this.abort.signal;
      let start = null;
      this.canvas.addEventListener("pointerdown", (event) => {
        const axis = this.nearest(event.offsetX);
        if (!axis) return;
        start = { axis, value: this.valueAt(axis, event.offsetY) };
        this.canvas.setPointerCapture(event.pointerId);
      }, { signal });
      this.canvas.addEventListener("pointermove", (event) => {
        if (!start) return;
        const value = this.valueAt(start.axis, event.offsetY);
        start.axis.range = [Math.min(start.value, value), Math.max(start.value, value)];
        this.paint();
      }, { signal });
      this.canvas.addEventListener("pointerup", (event) => {
        if (!start) return;
        const { axis, value } = start, end = this.valueAt(axis, event.offsetY);
        if (Math.abs(end - value) < 0.01 * (axis.high - axis.low)) axis.range = null;
        start = null;
        this.changed(true);
      }, { signal });
    }

    get width() { return this.place.clientWidth; }
    x(index) { return 46 + (index * (this.width - 92)) / Math.max(1, this.axes.length - 1); }
    y(axis, value) {
      const share = axis.isLog ? Math.log(value / axis.low) / Math.log(axis.high / axis.low)
        : (value - axis.low) / (axis.high - axis.low);
      return this.height - 22 - share * (this.height - 72);
    }
    valueAt(axis, y) {
      const share = Math.min(1.02, Math.max(-0.02, (this.height - 22 - y) / (this.height - 72)));
      return axis.isLog ? axis.low * (axis.high / axis.low) ** share : axis.low + share * (axis.high - axis.low);
    }
    nearest(x) { return this.axes.find((axis, index) => Math.abs(this.x(index) - x) < 18); }

    selected(line) {
      return this.axes.every((axis) => !axis.range
        || (axis.values[line] >= axis.range[0] && axis.values[line] <= axis.range[1]));
    }

    changed(fields = false) {
      if (fields) for (const axis of this.axes) if (!axis.range || !axis.isNumber) axis.select.value = "";
      this.paint();
      if (!this.page.select) return;
      const tests = this.axes.filter((axis) => axis.range).map((axis) => {
        const [low, high] = axis.range;
        if (axis.isNumber) return [axis.name, (value) => value !== null && value >= low && value <= high];
        const kept = new Set(axis.names.filter((_, code) => code >= low && code <= high));
        return [axis.name, (value) => kept.has(String(value))];
      });
      this.page.select(this.place, tests);
    }

    paint() {
      const ratio = window.devicePixelRatio || 1, width = this.width;
      this.shades = this.page.themed(this.scale);
      if (!width) return;
      this.canvas.width = width * ratio;
      this.canvas.height = this.height * ratio;
      this.canvas.style.height = `${this.height}px`;
      const pen = this.canvas.getContext("2d");
      pen.scale(ratio, ratio);
      pen.fillStyle = this.page.colour("paper");
      pen.fillRect(0, 0, width, this.height);
      const brushed = this.axes.some((axis) => axis.range);
      const kept = this.order.filter((line) => this.selected(line));
      const lines = (chosen, style) => {
        for (const line of chosen) {
          pen.strokeStyle = style(line);
          pen.beginPath();
          this.axes.forEach((axis, index) => pen.lineTo(this.x(index), this.y(axis, axis.values[line])));
          pen.stroke();
        }
      };
      pen.globalAlpha = kept.length > 800 ? 0.35 : 0.7;
      if (brushed) { pen.globalAlpha = 0.25; lines(this.order, () => this.page.colour("grid")); pen.globalAlpha = 0.8; }
      lines(kept, (line) => this.colourOf(this.rank[line]));
      pen.globalAlpha = 1;
      this.axes.forEach((axis, index) => this.paintAxis(pen, axis, this.x(index), index));
      this.status.textContent = brushed
        ? `${kept.length.toLocaleString("en")} of ${this.order.length.toLocaleString("en")} lines are selected.`
        : "Drag along an axis to select a range; a click on the axis clears it.";
    }

    paintAxis(pen, axis, x, index) {
      pen.strokeStyle = this.page.colour("muted");
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(x, this.y(axis, axis.low));
      pen.lineTo(x, this.y(axis, axis.high));
      pen.stroke();
      pen.font = "11px system-ui, sans-serif";
      pen.textAlign = "center";
      pen.fillStyle = this.page.colour("ink");
      pen.fillText(short(axis.name, 14), x, index % 2 ? 18 : 34, this.x(1) * 1.8);
      const last = index === this.axes.length - 1;
      pen.textAlign = last ? "right" : "left";
      axis.ticks.forEach((tick, place) => {
        const text = short(axis.texts[place], 10), y = this.y(axis, tick), at = x + (last ? -5 : 5);
        pen.lineWidth = 3;
        pen.strokeStyle = this.page.colour("paper");
        pen.strokeText(text, at, y + 4);
        pen.fillStyle = this.page.colour("ink");
        pen.fillText(text, at, y + 4);
      });
      if (!axis.range) return;
      const [low, high] = axis.range.map((value) => this.y(axis, Math.min(axis.high, Math.max(axis.low, value))));
      pen.fillStyle = this.page.colour("accent");
      pen.globalAlpha = 0.35;
      pen.fillRect(x - 7, high - 3, 14, low - high + 6);
      pen.globalAlpha = 1;
    }

    colourOf(share) {
      const stops = this.shades;
      const next = Math.max(1, stops.findIndex((stop) => stop[0] >= share));
      const [from, to] = [stops[next - 1], stops[next]];
      const part = (share - from[0]) / (to[0] - from[0] || 1);
      const rgb = [from[1], to[1]].map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
      return `rgb(${rgb[0].map((one, index) => Math.round(one + part * (rgb[1][index] - one))).join(",")})`;
    }
  };
})();
