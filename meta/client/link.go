package client

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// LinkConfig is a chunk server's standing stream to a metadata server.
type LinkConfig struct {
	Addrs    []string
	Name     string
	Logger   *slog.Logger
	Report   func() wire.Report                                 // who the server is, how full
	Order    func(context.Context, meta.Order) meta.OrderResult // carries out an order
	Interval time.Duration                                      // between reports; default 2 s
}

// maxOrders bounds the orders carried out at once.
const maxOrders = 16

// RunLink keeps the stream until ctx ends, connecting again when it breaks.
// It returns an error only when the server refuses us for good.
func RunLink(ctx context.Context, cfg LinkConfig) error {
	if cfg.Interval == 0 {
		cfg.Interval = 2 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	for ctx.Err() == nil {
		err := runLink(ctx, cfg)
		if ctx.Err() != nil {
			return nil
		}
		if k := meta.KindOf(err); k == meta.Version || k == meta.BadCapability {
			return err
		}
		cfg.Logger.Warn("stream to the metadata server lost, trying again", "error", err)
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
	return nil
}

func runLink(ctx context.Context, cfg LinkConfig) error {
	s := &Session{
		cfg: Config{Addrs: cfg.Addrs, Name: cfg.Name, Role: wire.RoleChunkServer},
		log: cfg.Logger, ready: make(chan struct{}), gotSrv: make(chan struct{}), epoch0: time.Now(),
	}
	s.cfg.Host, s.cfg.PID, s.cfg.Start = self()
	rd, err := s.connect(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	stop := context.AfterFunc(ctx, func() { s.conn.Close() })
	defer stop()
	wg.Go(func() {
		for {
			r := cfg.Report()
			if s.send.Send(0, &r) != nil {
				return
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(cfg.Interval):
			}
		}
	})
	slots := make(chan struct{}, maxOrders)
	for {
		t, id, body, err := rd.Next()
		if err != nil {
			return err
		}
		if t != wire.TOrder {
			continue // servers, keep-alives: nothing for us
		}
		var m wire.Order
		if err := wire.Decode(body, &m); err != nil {
			return err
		}
		if m.Order.Kind == meta.OrderKeys {
			// Keys first: what follows may depend on them.
			s.send.Send(id, &wire.OrderRe{Result: cfg.Order(ctx, m.Order)})
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			s.send.Send(id, &wire.OrderRe{Result: cfg.Order(ctx, m.Order)})
		})
	}
}
