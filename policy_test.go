package penstock

import (
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// TestPolicySetOvertakesAnAnswer: a policy that the owner announced stays in force
// against an older answer.
func TestPolicySetOvertakesAnAnswer(t *testing.T) {
	inFakeTime(t, Config{}, func(t *testing.T, w *world, v *Volume) {
		w.mu.Lock()
		w.overtake = func() { v.c.PolicySet(v.id, meta.Policy{Replicas: 1, NoAtime: true}) }
		w.mu.Unlock()
		time.Sleep(2 * policyAge)
		if !v.Policy().NoAtime {
			t.Error("an answer from before replaced what the owner said")
		}
	})
}
