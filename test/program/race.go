//go:build race

package program

// race: Build adds the race detector. A race ends the program with a status that tests
// see.
const race = true
