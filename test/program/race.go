//go:build race

package program

// race: what is built has the race detector, too; a race ends it with a status
// that tests see.
const race = true
