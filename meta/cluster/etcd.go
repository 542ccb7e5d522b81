package cluster

import (
	"context"
	"slices"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

// etcdWait bounds how long a member is waited for.
const etcdWait = 2 * time.Second

// Etcd returns etcd's health: its members and alarms, and the size at each endpoint. Facts
// that can't be determined are noted in the result.
func (c *Cluster) Etcd(ctx context.Context, endpoints []string) meta.EtcdHealth {
	ctx, cancel := context.WithTimeout(ctx, etcdWait)
	defer cancel()
	h := meta.EtcdHealth{Endpoints: make([]meta.EtcdEndpoint, len(endpoints))}
	var asked sync.WaitGroup
	for i, e := range endpoints {
		asked.Go(func() { h.Endpoints[i] = c.endpoint(ctx, e) })
	}
	members, err := c.cli.MemberList(ctx)
	var alarms *clientv3.AlarmResponse
	if err == nil {
		h.Members = len(members.Members)
		alarms, err = c.cli.AlarmList(ctx)
	}
	if err == nil {
		for _, a := range alarms.Alarms {
			if name := a.Alarm.String(); !slices.Contains(h.Alarms, name) {
				h.Alarms = append(h.Alarms, name)
			}
		}
	}
	if err != nil {
		h.Error = err.Error()
	}
	asked.Wait()
	return h
}

func (c *Cluster) endpoint(ctx context.Context, address string) meta.EtcdEndpoint {
	e := meta.EtcdEndpoint{Address: address}
	r, err := c.cli.Status(ctx, address)
	if err != nil {
		e.Error = err.Error()
		return e
	}
	e.Bytes, e.Used, e.Quota = uint64(r.DbSize), uint64(r.DbSizeInUse), uint64(r.DbSizeQuota)
	e.NoLeader = r.Leader == 0
	return e
}
