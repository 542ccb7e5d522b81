package crash

import (
	"strings"
	"testing"
)

// control switches one mechanism off and names the test that must then fail.
type control struct {
	name  string // value of ControlEnv
	guard func(t *testing.T, env string) error
}

// controlRounds is how many rounds a guard has to notice.
const controlRounds = 12

var allControls = []control{
	{"chunk-nosync", powerGuard},
	{"journal-nosync", powerGuard},
	{"chunk-noverify", flipGuard},
	{"meta-norecall", coherenceGuard},
}

// TestControls runs each guard with its mechanism off. A guard that stays green
// guards nothing.
func TestControls(t *testing.T) {
	if !*controls {
		t.Log("only with -controls (make controls)")
		return
	}
	for _, c := range allControls {
		t.Run(c.name, func(t *testing.T) {
			err := c.guard(t, ControlEnv+"="+c.name)
			if err == nil {
				t.Fatalf("with %s the guarding test stays green", c.name)
			}
			first, _, _ := strings.Cut(err.Error(), "\n")
			t.Logf("red, as it must be: %s", first)
		})
	}
}

func powerGuard(t *testing.T, env string) error {
	m := machineOf(t, 512<<20, 512<<20)
	m.env = []string{env}
	return m.powerRounds(t.Context(), controlRounds, *seed, t.Logf)
}

func flipGuard(t *testing.T, env string) error {
	s := newSystem(t)
	if err := s.prepareFlips(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.env = []string{env}
	d := damaged[0]
	_, err := s.flip(t.Context(), controlRounds, *seed, d.folder, d.match)
	return err
}

func coherenceGuard(t *testing.T, env string) error {
	s := newSystem(t)
	s.env = []string{env}
	return s.twoMounts(t.Context(), 500, *seed)
}

// TestTwoMounts: what one mount changed, the other sees when the call returned.
func TestTwoMounts(t *testing.T) {
	if err := newSystem(t).twoMounts(t.Context(), few(5)*100, *seed); err != nil {
		t.Fatal(err)
	}
}
