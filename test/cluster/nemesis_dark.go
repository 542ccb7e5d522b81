package cluster

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"
)

func (n *nemesis) ofPower() []fault {
	return []fault{
		{"blackout of all chunk servers", []string{"chunk"}, 4 * time.Second, 4, n.blackout(n.chunks)},
		{"blackout of all etcd", []string{"etcd"}, 4 * time.Second, 4, n.blackout(n.etcd)},
	}
}

// blackout takes the power of all at once: only the bytes on the disks are left, no copy
// elsewhere helps. Acknowledgements meanwhile do not count (see load.Options.Over).
func (n *nemesis) blackout(of func() []*Member) doing {
	return func(context.Context, *rand.Rand) (string, func(context.Context) error, error) {
		n.s.dark.Add(1)
		members := of()
		var errs []error
		for _, m := range members {
			m.mayDie.Store(true)
			m.note("power cut of all")
			errs = append(errs, m.freeze()) // see CutPower
		}
		for _, m := range members {
			errs = append(errs, m.disk.Cut())
		}
		for _, m := range members {
			m.Kill()
			m.mayDie.Store(false)
		}
		return "all of them", func(ctx context.Context) error {
			defer n.s.dark.Add(-1)
			for _, m := range members {
				if err := errors.Join(m.Reboot(), m.Start()); err != nil {
					return err
				}
			}
			return n.c.Ready(ctx, members...)
		}, errors.Join(errs...)
	}
}
