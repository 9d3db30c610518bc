"use strict";
// Draws the figures that stand in the page as JSON, in the page's own colours.

(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function colours() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(`--${name}`).trim();
    return {
      back: get("back"), text: get("text"), soft: get("soft"), line: get("line"),
      shades: [0, 1, 2, 3, 4, 5].map((place) => get(`s${place}`)),
    };
  }

  const zone = new Intl.DateTimeFormat(undefined, {
    year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", timeZoneName: "short",
  });

  // On hover a stretch of time begins in the reader's own time, too; axes are of UTC, where no hour comes twice.
  function timed(trace) {
    if (!trace.hovertemplate?.includes("%{x} UTC")) return {};
    const hovertemplate = trace.hovertemplate.replace("%{x} UTC", "%{customdata} (%{x|%Y-%m-%d %H:%M} UTC)");
    return { hovertemplate, customdata: trace.x.map((at) => zone.format(new Date(at))) };
  }

  function themed(figure) {
    const { back, text, soft, line, shades } = colours();
    const axis = (own) => ({ gridcolor: line, linecolor: soft, zerolinecolor: line, automargin: true, ...own });
    const data = figure.data.map((trace, place) => {
      const shade = trace.meta?.shade ?? place;
      const colour = shade < 0 ? soft : shades[shade % shades.length];
      const pattern = trace.marker?.pattern ? { pattern: { ...trace.marker.pattern, bgcolor: back, fgcolor: colour, fillmode: "replace", solidity: 0.4 } } : {};
      return {
        ...trace,
        ...timed(trace),
        line: { width: 2, ...trace.line, color: colour },
        marker: { ...trace.marker, color: colour, ...pattern, line: { width: trace.type === "bar" ? 1 : 0, color: colour } },
      };
    });
    const layout = {
      ...figure.layout,
      autosize: true,
      height: figure.layout.height ?? 330,
      uirevision: "kept",
      paper_bgcolor: back,
      plot_bgcolor: back,
      font: { color: text, family: "system-ui, sans-serif", size: 12 },
      colorway: shades,
      margin: { l: 48, r: 12, t: 24, b: 44 },
      legend: { orientation: "h", x: 0, y: 1.01, yanchor: "bottom", traceorder: "normal", ...figure.layout.legend },
      hoverlabel: { bgcolor: back, bordercolor: soft, font: { color: text } },
      xaxis: axis(figure.layout.xaxis),
      yaxis: axis(figure.layout.yaxis),
      shapes: (figure.layout.shapes ?? []).map((shape) => ({ ...shape, line: { ...shape.line, color: text } })),
    };
    return { data, layout };
  }

  function draw(chart) {
    if (!window.Plotly) {
      chart.classList.add("bare");
      chart.querySelector("details")?.setAttribute("open", "");
      return;
    }
    const { data, layout } = themed(JSON.parse(chart.querySelector("script[type='application/json']").textContent));
    const config = { displaylogo: false, responsive: true, displayModeBar: false };
    chart.classList.add("drawn");
    window.Plotly.react(chart.querySelector(".plot"), data, layout, config);
  }

  function drawAll() {
    for (const chart of document.querySelectorAll(".chart")) draw(chart);
  }

  function update(fresh) {
    const root = document.getElementById("charts");
    const names = (node) => [...node.querySelectorAll(".chart")].map((chart) => chart.id).join(" ");
    if (names(root) !== names(fresh)) {
      root.replaceChildren(...fresh.childNodes);
      drawAll();
      return;
    }
    for (const chart of root.querySelectorAll(".chart")) {
      const other = fresh.querySelector(`#${chart.id}`);
      const old = chart.querySelector("script[type='application/json']");
      const text = other.querySelector("script[type='application/json']").textContent;
      if (text === old.textContent) continue;
      old.textContent = text;
      chart.querySelector(".plot").setAttribute("aria-label", other.querySelector(".plot").getAttribute("aria-label"));
      chart.querySelector("h2").textContent = other.querySelector("h2").textContent;
      chart.querySelector("tbody").replaceChildren(...other.querySelector("tbody").childNodes);
      draw(chart);
    }
  }

  window.autospecCharts = { update };
  dark.addEventListener("change", drawAll);
  drawAll();
})();
