// Package wrong has a test that sees other bytes, if it is asked to.
package wrong

import (
	"os"
	"testing"
)

func TestBytes(t *testing.T) {
	if os.Getenv("VERDICT_WRONG") != "" {
		t.Error("DATA: other bytes than were written")
	}
}
