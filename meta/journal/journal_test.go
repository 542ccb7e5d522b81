package journal_test

import (
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/journal/journaltest"
)

func TestMemory(t *testing.T) {
	journaltest.Run(t, func(t *testing.T) journaltest.Form {
		m := journal.NewMemory(journaltest.Volume)
		return journaltest.Form{
			Take: func(*testing.T) (journal.Store, meta.Term, <-chan struct{}) {
				s, term := m.Take()
				return s, term, make(chan struct{})
			},
			Reader: func(*testing.T) journal.Store { return m.Reader() },
			Damage: func(_ *testing.T, seq meta.Seq, value []byte) { m.Damage(seq, value) },
		}
	})
}
