// Bring charts into view one after another until they are drawn, and tell their number.
const [selector, done] = arguments, places = [...document.querySelectorAll(selector)];
let next = 0;
const step = () => {
  while (next < places.length && places[next].dataset.drawn) next += 1;
  if (next === places.length) { done(places.length); return; }
  places[next].scrollIntoView();
  setTimeout(step, 50);
};
step();
