"use strict";
(() => {
  const read = (name) => JSON.parse(document.getElementById(`data-${name}`).textContent);
  const root = document.documentElement;
  const colours = read("colours"), figures = read("figures"), tables = read("tables");
  const narrow = window.matchMedia("(max-width: 640px)");
  const element = (name, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };

  /* Themes: every colour of a figure is one of the light theme, and is exchanged for that of the same role. */
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let printing = false;
  const isDark = () => !printing && (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const darkOf = Object.fromEntries(Object.keys(colours.light).map((role) => [colours.light[role], colours.dark[role]]));
  const themed = (value) => {
    if (!isDark()) return value;
    if (typeof value === "string") return Object.hasOwn(darkOf, value) ? darkOf[value] : value;
    if (Array.isArray(value)) return value.map(themed);
    if (value && typeof value === "object" && !("bdata" in value))
      return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, themed(part)]));
    return value;
  };
  const colour = (role) => colours[isDark() ? "dark" : "light"][role];

  /* Charts are drawn when they come near the view. */
  const drawn = new Map();
  const settings = {
    responsive: true, displaylogo: false, showTips: false, scrollZoom: false,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };
  const copy = (value) => JSON.parse(JSON.stringify(value));
  function draw(place) {
    const figure = figures[place.id];
    const shown = themed(copy(figure));
    if (figure.data.some((trace) => trace.type === "parcoords")) {
      drawn.get(place)?.close();
      drawn.set(place, new Parallel(place, figure));
      return Promise.resolve();
    }
    const layout = { ...shown.layout, autosize: true };
    if (narrow.matches) layout.dragmode = false;
    const config = { ...settings, displayModeBar: narrow.matches || printing ? false : "hover" };
    drawn.set(place, place);
    return Plotly.react(place, shown.data, layout, config).then(() => { place.dataset.drawn = "1"; });
  }
  const places = [...document.querySelectorAll(".plot")];
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "400px" });
  const redraw = () => [...drawn.keys()].map(draw);

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

  /* Parallel coordinates on a canvas: Plotly's own need WebGL and code that the page's policy forbids. Ranges are
     selected by dragging along an axis, or by the fields below, which the keyboard reaches. */
  class Parallel {
    constructor(place, figure) {
      const trace = figure.data.find((one) => one.type === "parcoords");
      this.place = place;
      this.axes = trace.dimensions.map((one, index) => this.axis(one, figure.layout.meta.axes[index]));
      this.colours = numbers(trace.line.color);
      this.scale = trace.line.colorscale;
      this.order = [...this.colours.keys()].sort((a, b) => this.colours[b] - this.colours[a]);
      this.rank = new Float64Array(this.order.length); // 0 for the fastest: times have a long tail, ranks do not
      this.order.forEach((line, place) => { this.rank[line] = 1 - place / Math.max(1, this.order.length - 1); });
      this.height = figure.layout.height;
      this.canvas = element("canvas");
      this.canvas.setAttribute("aria-hidden", "true");
      this.status = element("p", { className: "note" });
      this.status.setAttribute("aria-live", "polite");
      place.classList.add("parallel");
      place.replaceChildren(this.canvas, this.status, this.fields());
      place.setAttribute("role", "group");
      this.listen();
      this.resizer = new ResizeObserver(() => this.paint());
      this.resizer.observe(place);
      this.paint();
      place.dataset.drawn = "1";
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
      const made = element("div", { className: "brushes" });
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
        made.append(element("label", {}, axis.name, select));
      }
      const clear = element("button", { type: "button", textContent: "Clear" });
      clear.addEventListener("click", () => { for (const axis of this.axes) axis.range = null; this.changed(true); });
      made.append(clear);
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
      const target = this.place.dataset.table && dataTables.get(this.place.dataset.table);
      if (!target) return;
      const tests = this.axes.filter((axis) => axis.range).map((axis) => {
        const [low, high] = axis.range;
        if (axis.isNumber) return [axis.name, (value) => value !== null && value >= low && value <= high];
        const kept = new Set(axis.names.filter((_, code) => code >= low && code <= high));
        return [axis.name, (value) => kept.has(String(value))];
      });
      target.brush(tests);
    }

    paint() {
      const ratio = window.devicePixelRatio || 1, width = this.width;
      this.shades = themed(this.scale);
      if (!width) return;
      this.canvas.width = width * ratio;
      this.canvas.height = this.height * ratio;
      this.canvas.style.height = `${this.height}px`;
      const pen = this.canvas.getContext("2d");
      pen.scale(ratio, ratio);
      pen.fillStyle = colour("paper");
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
      if (brushed) { pen.globalAlpha = 0.25; lines(this.order, () => colour("grid")); pen.globalAlpha = 0.8; }
      lines(kept, (line) => this.colourOf(this.rank[line]));
      pen.globalAlpha = 1;
      this.axes.forEach((axis, index) => this.paintAxis(pen, axis, this.x(index), index));
      this.status.textContent = brushed
        ? `${kept.length.toLocaleString("en")} of ${this.order.length.toLocaleString("en")} lines are selected.`
        : "Drag along an axis to select a range; a click on the axis clears it.";
    }

    paintAxis(pen, axis, x, index) {
      pen.strokeStyle = colour("muted");
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(x, this.y(axis, axis.low));
      pen.lineTo(x, this.y(axis, axis.high));
      pen.stroke();
      pen.font = "11px system-ui, sans-serif";
      pen.textAlign = "center";
      pen.fillStyle = colour("ink");
      pen.fillText(short(axis.name, 14), x, index % 2 ? 18 : 34, this.x(1) * 1.8);
      const last = index === this.axes.length - 1;
      pen.textAlign = last ? "right" : "left";
      axis.ticks.forEach((tick, place) => {
        const text = short(axis.texts[place], 10), y = this.y(axis, tick), at = x + (last ? -5 : 5);
        pen.lineWidth = 3;
        pen.strokeStyle = colour("paper");
        pen.strokeText(text, at, y + 4);
        pen.fillStyle = colour("ink");
        pen.fillText(text, at, y + 4);
      });
      if (!axis.range) return;
      const [low, high] = axis.range.map((value) => this.y(axis, Math.min(axis.high, Math.max(axis.low, value))));
      pen.fillStyle = colour("accent");
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
  }
  const short = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}\u2026` : text);

  /* Tables of data: sorted by their headings, filtered by conditions and words, shown in pages, exported as CSV. */
  const PAGE = 50;
  const CONDITION = /^([^\s<>=!]+)(<=|>=|!=|=|<|>)(.+)$/;
  class DataTable {
    constructor(place, data) {
      this.place = place;
      this.data = data;
      this.rows = data.rows;
      this.sort = { column: -1, up: true };
      this.page = 0;
      this.brushed = [];
      this.query = "";
      this.build();
      this.apply();
    }

    build() {
      const names = this.data.columns.map((column) => column[0]);
      const example = names.includes("time") ? "outcome=ok time<1000" : names[0];
      const field = element("input", { type: "search", placeholder: `Filter: ${example}, or any words` });
      field.setAttribute("aria-label", "Filter the rows by conditions or words");
      field.addEventListener("input", () => { this.query = field.value; this.page = 0; this.apply(); });
      const save = element("button", { type: "button", textContent: "Export CSV", className: "export" });
      save.addEventListener("click", () => this.export());
      this.count = element("span", { className: "count" });
      this.count.setAttribute("role", "status");
      this.before = element("button", { type: "button", textContent: "Previous" });
      this.after = element("button", { type: "button", textContent: "Next" });
      this.before.addEventListener("click", () => { this.page -= 1; this.show(); });
      this.after.addEventListener("click", () => { this.page += 1; this.show(); });
      const head = element("tr");
      this.headings = this.data.columns.map(([name, unit, isNumber], index) => {
        const button = element("button", { type: "button", textContent: unit ? `${name}, ${unit}` : name });
        button.addEventListener("click", () => this.sortBy(index));
        const cell = element("th", { scope: "col", className: isNumber ? "number" : "" }, button);
        head.append(cell);
        return cell;
      });
      this.body = element("tbody");
      const table = element("table", {}, element("thead", {}, head), this.body);
      const scroll = element("div", { className: "scroll", tabIndex: 0 }, table);
      scroll.setAttribute("role", "region");
      scroll.setAttribute("aria-label", "Table of all trials");
      const tools = element("div", { className: "tools" }, field, save);
      const pages = element("div", { className: "tools" }, this.before, this.after, this.count);
      this.place.replaceChildren(tools, scroll, pages);
    }

    brush(tests) {
      const names = this.data.columns.map((column) => column[0]);
      this.brushed = tests.map(([name, test]) => [names.indexOf(name), test]).filter(([index]) => index >= 0);
      this.page = 0;
      this.apply();
    }

    sortBy(column) {
      this.sort = { column, up: this.sort.column === column ? !this.sort.up : true };
      this.headings.forEach((cell, index) => {
        if (index === column) cell.setAttribute("aria-sort", this.sort.up ? "ascending" : "descending");
        else cell.removeAttribute("aria-sort");
      });
      this.page = 0;
      this.apply();
    }

    tests() {
      const names = this.data.columns.map((column) => column[0].toLowerCase());
      return this.query.trim().toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
        const found = CONDITION.exec(word), index = found ? names.indexOf(found[1]) : -1;
        if (index < 0) return (row) => row.some((cell) => cell !== null && String(cell).toLowerCase().includes(word));
        const [, , sign, text] = found, limit = Number(text);
        return (row) => {
          const cell = row[index];
          if (cell === null) return false;
          if (sign === "=" || sign === "!=") {
            const same = typeof cell === "number" && !Number.isNaN(limit) ? cell === limit : String(cell).toLowerCase() === text;
            return same === (sign === "=");
          }
          const value = Number(cell);
          return sign === "<" ? value < limit : sign === ">" ? value > limit : sign === "<=" ? value <= limit : value >= limit;
        };
      });
    }

    apply() {
      const tests = this.tests();
      this.kept = this.rows.filter((row) => tests.every((test) => test(row))
        && this.brushed.every(([index, test]) => test(row[index])));
      const { column, up } = this.sort;
      if (column >= 0) this.kept.sort((a, b) => compared(a[column], b[column], up));
      this.show();
    }

    show() {
      const pages = Math.max(1, Math.ceil(this.kept.length / PAGE));
      this.page = Math.min(Math.max(this.page, 0), pages - 1);
      const first = this.page * PAGE, shown = this.kept.slice(first, first + PAGE);
      this.body.replaceChildren(...shown.map((row) => element("tr", {}, ...row.map((cell, index) => {
        const text = cell === null ? "" : typeof cell === "number" ? this.number(cell, index) : String(cell);
        const made = element("td", { textContent: text, className: this.data.columns[index][2] ? "number" : "" });
        if (text.length > 40) made.title = text;
        return made;
      }))));
      this.before.disabled = this.page === 0;
      this.after.disabled = this.page === pages - 1;
      const range = shown.length ? `${first + 1}\u2013${first + shown.length} of ` : "";
      const all = this.kept.length < this.rows.length ? ` (${this.rows.length.toLocaleString("en")} in all)` : "";
      this.count.textContent = `${range}${this.kept.length.toLocaleString("en")} rows${all}`;
      this.place.dataset.drawn = "1";
    }

    number(value, index) {
      return this.data.columns[index][2] ? value.toLocaleString("en", { maximumSignificantDigits: 6 }) : String(value);
    }

    csv() {
      const cell = (value) => {
        let text = value === null ? "" : String(value);
        if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`; // no formula of a spreadsheet
        return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
      };
      const head = this.data.columns.map(([name, unit]) => (unit ? `${name} (${unit})` : name));
      return `${[head, ...this.kept].map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`;
    }

    export() {
      const url = URL.createObjectURL(new Blob([this.csv()], { type: "text/csv;charset=utf-8" }));
      const link = element("a", { href: url, download: `${this.data.file}.csv` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(url), 1000);
    }
  }
  function compared(a, b, up) {
    if (a === null || b === null) return (a === null) - (b === null); // without a value last, in both orders
    const order = typeof a === "number" && typeof b === "number" ? a - b
      : String(a).localeCompare(String(b), "en", { numeric: true });
    return up ? order : -order;
  }
  const dataTables = new Map();
  for (const place of document.querySelectorAll(".data-table"))
    dataTables.set(place.id, new DataTable(place, tables[place.id]));

  const button = document.getElementById("theme");
  const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    name();
    redraw();
  });
  system.addEventListener("change", () => { name(); redraw(); });
  name();
  window.addEventListener("beforeprint", () => {
    printing = true;
    for (const study of document.querySelectorAll("details.study")) study.open = true;
    places.map(draw);
  });
  window.addEventListener("afterprint", () => { printing = false; redraw(); });
  const target = () => {
    const study = document.getElementById(decodeURIComponent(location.hash.slice(1)))?.closest("details");
    if (study) study.open = true;
  };
  window.addEventListener("hashchange", target);
  target();
  places.forEach((place) => watcher.observe(place));
})();
