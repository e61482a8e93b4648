// One JSON line per step; see steps.py.
exports.AI = (where) => `SELECT id, ai_generate('Colour of ' || body) AS a FROM notes WHERE ${where} ORDER BY id`;
exports.step = async (what, call) => {
  try {
    console.log(JSON.stringify({ what, got: await call() }));
  } catch (error) {
    console.log(JSON.stringify({ what, sqlstate: error.code || error.parent?.code || `${error}` }));
  }
};
