package stream

import (
	"errors"
	"fmt"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/placement"
)

// gateways returns this gateway and the registered gateways; nil: this process leads whatever
// clients ask for.
type gateways func() (self placement.Gateway, live []placement.Gateway)

// elsewhere returns the gateway that is to lead what a key identifies; other: the gateway is another
// process. Number 0 says that no gateway is registered.
func (l gateways) elsewhere(key placement.Key) (g placement.Gateway, other bool) {
	if l == nil {
		return g, false
	}
	self, live := l()
	g, _ = placement.Leader(key, live)
	return g, g.Number != self.Number
}

// at returns the gateway with the address of a leader. A gateway that is not registered may still
// lead something, as long as the gateway's session lasts. Errors: NotFound.
func (l gateways) at(address string) (placement.Gateway, error) {
	g, ok := placement.ParseAddress(address)
	if !ok {
		return g, meta.E("find leader", meta.NotFound, address, errors.New("the leader tells no address of a gateway"))
	}
	if l != nil {
		_, live := l()
		for _, x := range live {
			if x.Number == g.Number {
				return x, nil
			}
		}
	}
	return g, nil
}

// errElsewhere is the error of a process that is not to lead something.
func errElsewhere(op, subject string, g placement.Gateway) error {
	if g.Number == 0 {
		return meta.E(op, meta.Unavailable, subject, errors.New("no gateway is registered"))
	}
	return meta.E(op, meta.NotOwner, subject, fmt.Errorf("gateway %d is to lead", g.Number))
}
