package main

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/net/dns/dnsmessage"
	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/clientcmd"
)

// The zone of a cluster's names; most clusters use this zone.
const zone = ".svc.cluster.local."

// names answers as Kubernetes' specification of DNS demands for services, and for pods
// behind headless services, in both directions: name to address, address to name.
type names struct {
	services corelisters.ServiceLister
	slices   discoverylisters.EndpointSliceLister
}

func newDNSCommand() *cobra.Command {
	var config, listen string
	cmd := &cobra.Command{
		Use:  "dns",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := clientcmd.BuildConfigFromFlags("", config)
			if err != nil {
				return err
			}
			client, err := kubernetes.NewForConfig(c)
			if err != nil {
				return err
			}
			f := informers.NewSharedInformerFactory(client, 10*time.Minute)
			n := names{f.Core().V1().Services().Lister(), f.Discovery().V1().EndpointSlices().Lister()}
			f.Start(cmd.Context().Done())
			for kind, synced := range f.WaitForCacheSync(cmd.Context().Done()) {
				if !synced {
					return errors.New("not read: " + kind.String())
				}
			}
			conn, err := net.ListenPacket("udp", listen)
			if err != nil {
				return err
			}
			return n.serve(conn)
		},
	}
	cmd.Flags().StringVar(&config, "kubeconfig", os.Getenv("KUBECONFIG"), "how to reach the API server")
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:53", "where to answer, UDP")
	cmd.SetContext(context.Background())
	return cmd
}

func (n names) serve(conn net.PacketConn) error {
	buf := make([]byte, 4096)
	for {
		got, from, err := conn.ReadFrom(buf)
		if err != nil {
			return err
		}
		answer, err := n.answer(buf[:got])
		if err != nil {
			continue // no question of DNS
		}
		if _, err := conn.WriteTo(answer, from); err != nil {
			return err
		}
	}
}

func (n names) answer(question []byte) ([]byte, error) {
	var p dnsmessage.Parser
	h, err := p.Start(question)
	if err != nil {
		return nil, err
	}
	q, err := p.Question()
	if err != nil {
		return nil, err
	}
	name := strings.ToLower(q.Name.String())
	head := dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: 5}
	m := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: h.ID, Response: true, Authoritative: true, RecursionDesired: h.RecursionDesired},
		Questions: []dnsmessage.Question{q},
	}
	if addr, is := reversed(name); is {
		pointed, err := n.of(addr)
		if err != nil {
			return nil, err
		}
		if len(pointed) == 0 {
			m.RCode = dnsmessage.RCodeNameError
		}
		for _, to := range pointed {
			target, err := dnsmessage.NewName(to)
			if err != nil {
				return nil, err
			}
			if q.Type == dnsmessage.TypePTR {
				m.Answers = append(m.Answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.PTRResource{PTR: target}})
			}
		}
		return m.Pack()
	}
	addrs, known := n.addresses(name)
	if !known {
		m.RCode = dnsmessage.RCodeNameError
	}
	for _, a := range addrs {
		if q.Type == dnsmessage.TypeA {
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.AResource{A: a.As4()}})
		}
	}
	return m.Pack()
}

// addresses returns the addresses of SERVICE.NAMESPACE or POD.SERVICE.NAMESPACE, and
// whether the name exists.
func (n names) addresses(name string) (all []netip.Addr, known bool) {
	rest, is := strings.CutSuffix(name, zone)
	if !is {
		return nil, false
	}
	parts := strings.Split(rest, ".")
	host := ""
	switch len(parts) {
	case 2:
	case 3:
		host, parts = parts[0], parts[1:]
	default:
		return nil, false
	}
	svc, err := n.services.Services(parts[1]).Get(parts[0])
	if err != nil {
		return nil, false
	}
	if ip := svc.Spec.ClusterIP; ip != core.ClusterIPNone {
		if a, err := netip.ParseAddr(ip); err == nil && host == "" {
			return []netip.Addr{a}, true
		}
		return nil, false
	}
	slices, err := n.slices.EndpointSlices(parts[1]).List(labels.SelectorFromSet(labels.Set{discovery.LabelServiceName: parts[0]}))
	if err != nil {
		return nil, false
	}
	for _, e := range endpoints(slices) {
		if host == "" || e.Hostname != nil && *e.Hostname == host {
			for _, text := range e.Addresses {
				if a, err := netip.ParseAddr(text); err == nil && a.Is4() {
					all = append(all, a)
				}
			}
		}
	}
	return all, host == "" || len(all) > 0
}

// of gives the names of the pods with an address.
func (n names) of(addr netip.Addr) (all []string, err error) {
	slices, err := n.slices.List(labels.Everything())
	if err != nil {
		return nil, err
	}
	for _, s := range slices {
		for _, e := range endpoints([]*discovery.EndpointSlice{s}) {
			for _, text := range e.Addresses {
				if text == addr.String() && e.Hostname != nil {
					all = append(all, *e.Hostname+"."+s.Labels[discovery.LabelServiceName]+"."+s.Namespace+zone)
				}
			}
		}
	}
	return all, nil
}

// endpoints returns the ready endpoints. Kubernetes also marks endpoints of a service as ready
// if the service wants endpoints that are not ready in its answers.
func endpoints(slices []*discovery.EndpointSlice) (all []discovery.Endpoint) {
	for _, s := range slices {
		for _, e := range s.Endpoints {
			if e.Conditions.Ready == nil || *e.Conditions.Ready {
				all = append(all, e)
			}
		}
	}
	return all
}

// reversed reads a name below in-addr.arpa.
func reversed(name string) (netip.Addr, bool) {
	rest, is := strings.CutSuffix(name, ".in-addr.arpa.")
	p := strings.Split(rest, ".")
	if !is || len(p) != 4 {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(p[3] + "." + p[2] + "." + p[1] + "." + p[0])
	return a, err == nil
}
