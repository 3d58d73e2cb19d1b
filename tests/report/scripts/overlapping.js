// Return true until the titles of the panels of the limits stand apart.
const found = [...document.querySelectorAll('figure[data-chart="limits"] .annotation')].map(
    (one) => one.getBoundingClientRect());
return found.length < 3 || found.some((one, place) => found.slice(place + 1).some(
    (other) => Math.abs(one.top - other.top) < 5 && one.left < other.right && other.left < one.right));
