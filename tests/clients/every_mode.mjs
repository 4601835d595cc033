// Plays another program of this folder in each of its modes, in one process that loads its packages once.
//
// `node every_mode.mjs PROGRAM MODES`: MODES is a JSON list with the program's arguments in each mode. Each mode
// evaluates the whole file with fresh globals, and the file prints one JSON line.

const [program, modes] = process.argv.slice(2);

for (const [number, programArguments] of JSON.parse(modes).entries()) {
  process.argv = [process.argv[0], program, ...programArguments];
  await import(`./${program}?mode=${number}`);
}
