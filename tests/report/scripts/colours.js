// Return the number of colours of a canvas.
const canvas = document.querySelector(arguments[0]), pen = canvas.getContext('2d');
return new Set(new Uint32Array(pen.getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size;
