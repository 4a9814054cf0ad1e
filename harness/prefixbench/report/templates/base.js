"use strict";
const payload = JSON.parse(document.getElementById("payload").textContent);
const root = document.documentElement;
const each = (selector, action, within = document) => within.querySelectorAll(selector).forEach(action);
const format = (value, digits = 2) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

// Colours in figures are "$role"; a role is a custom property of the page, so that both themes draw from one figure.
const colour = (role) => getComputedStyle(root).getPropertyValue(`--${role}`).trim();
const themed = (value) => {
  if (typeof value === "string") return value.startsWith("$") ? colour(value.slice(1)) : value;
  if (Array.isArray(value)) return value.map(themed);
  if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, themed(item)]));
  return value;
};

let printing = false;

const redraws = [];
const redraw = () => redraws.forEach((draw) => draw());

const setTheme = (name) => {
  root.dataset.theme = name;
  const button = document.getElementById("theme");
  button.setAttribute("aria-pressed", String(name === "dark"));
  button.textContent = name === "dark" ? "Light" : "Dark";
  button.setAttribute("aria-label", `Use the ${name === "dark" ? "light" : "dark"} theme`);
};

const setUpTheme = () => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const fromSystem = () => (system.matches ? "dark" : "light");
  setTheme(fromSystem());
  let chosen = false;
  system.addEventListener("change", () => {
    if (chosen || printing) return;
    setTheme(fromSystem());
    redraw();
  });
  document.getElementById("theme").addEventListener("click", () => {
    chosen = true;
    setTheme(root.dataset.theme === "dark" ? "light" : "dark");
    redraw();
  });
  let before = null;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    printing = true;
    setTheme("light");
    each("details:not([open])", (item) => { item.open = true; item.dataset.printed = ""; });
    each(".option[hidden] .plot", draw);
    redraw();
  });
  addEventListener("afterprint", () => {
    printing = false;
    setTheme(before);
    each("details[data-printed]", (item) => { item.open = false; delete item.dataset.printed; });
    redraw();
  });
};
